"""The end of what an emulated cloud does in the background."""

from inventory.localcloud.ecs import power


def wait_until_idle(cloud, timeout_s=60):
    """Return when nothing goes on any more; not to be called with the cloud's lock held. Raises TimeoutError."""
    with power._guard:
        threads = list(power._going_on[cloud.file])
    for thread in threads:
        thread.join(timeout_s)
        if thread.is_alive():
            raise TimeoutError(f"{thread.name} still goes on after {timeout_s} s")
