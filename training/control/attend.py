"""Stay with a run at the terminal: follow it, say how it ended, bring it home."""

from __future__ import annotations

from training.control import runs
from training.control.fetch import FetchInterrupted, fetch_here, fetch_patiently
from training.control.follow import Look, follow
from training.control.head_node import Head, HeadError, RemoteHead
from training.control.terminal import progress
from training.launch import LaunchError
from training.run_folder import LOCAL_RUNS

WATCH_EVERY_S = 5.0


class RunFailed(LaunchError):
    """The run ended badly; the message says why."""


def attend(head: Head, run_id: str) -> Look | None:
    """Show a run until it is over; None after Ctrl-C. Raises HeadError when the head stays away."""
    try:
        with progress(run_id) as show:
            return follow(lambda: runs.look(head, run_id), show, HeadError)
    except KeyboardInterrupt:
        say_detached(run_id, head.here)
        return None
    except HeadError as error:
        raise HeadError(
            f"{head.name} has not answered for a while ({error}); the run may well go on there. "
            f"Look again with: fab logs --follow --run {run_id}"
        ) from error


def say_detached(run_id: str, here: bool) -> None:
    """The run needs no terminal; how to see and end it."""
    where = f"--run {run_id}{' --here' if here else ''}"
    print(f"{run_id} goes on by itself. See it: fab logs --follow {where}\nEnd it: fab stop {where}")


def conclude(head: Head, run_id: str, seen: Look) -> None:
    """Say how a run ended. Raises RunFailed for a failure, after the failing rank's last words; LaunchError where
    what the run was given is to blame."""
    if seen.state in {"failed", "lost"}:
        for line in seen.status.last_lines if seen.status else ():
            print(f"  | {line}")
        reason = (seen.status.reason if seen.status else "") or f"its supervisor on {head.name} is gone"
        if seen.status and seen.status.mistake:
            raise LaunchError(f"{run_id}: {reason}")
        raise RunFailed(f"{run_id} failed: {reason}")
    print(f"{run_id} {seen.state}")


def bring_home(head: Head, run_id: str, full: bool = False) -> int | None:
    """Fetch a run, verify it, say what came; gives the step of its checkpoint. `full`: the optimizer's state too."""
    if isinstance(head, RemoteHead):
        fetched = fetch_patiently(head.open_sftp, head.close, str(head.runs / run_id), LOCAL_RUNS / run_id, full)
    else:
        fetched = fetch_here(head.runs / run_id)
    if fetched.step is None:
        print(f"{fetched.folder}: papers and logs, there is no checkpoint")
    else:
        print(
            f"fetched {fetched.folder}: adapter of step {fetched.step} in {fetched.folder}/adapter, verified "
            f"({fetched.bytes_moved / 2**20:.1f} MiB moved)"
        )
    return fetched.step


def watch_home(head: Head, run_id: str, step: int | None, full: bool = False) -> None:
    """Fetch every new checkpoint until the run is over."""

    def look_and_fetch() -> Look:
        nonlocal step
        seen = runs.look(head, run_id)
        if runs.checkpoint_step(head, run_id) != step:
            try:
                step = bring_home(head, run_id, full)
            except FetchInterrupted as error:
                raise HeadError(str(error)) from error  # to be patient with
        return seen

    follow(look_and_fetch, lambda seen: None, HeadError, every_s=WATCH_EVERY_S)
    bring_home(head, run_id, full)
