"""`fab train --from-adapter RUN_ID`: a new run begins with the weights of an earlier run's adapter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from training.laptop import new_run, runs
from training.laptop.head_node import Head, HereHead
from training.laptop.on_head import fs
from training.recipe.reading import parse_recipe
from training.recipe.recipe import Recipe
from training.recipe.tables import DPO, Lora
from training.run.folder import LOCAL_RUNS, checkpoint_folder, is_run_id
from training.run.history import RECORD, WEIGHTS, EarlierStage, parse_record, record_text
from training.run.launch import Launch, LaunchError
from training.text.files import ADAPTER_WEIGHTS, STATE, SUMS, bounded_json, parse_sums

IN_THE_WEIGHTS = ("base_model", "tuning", *(f"lora.{key}" for key in Lora.model_fields if key != "dropout"))
"""Keys of a recipe on which depend which tensors an adapter has, and what they mean."""


@dataclass(frozen=True)
class EarlierAdapter:
    """The adapter of a run as a fetch would bring it, and all that is said of it."""

    head: Head
    """Where it lies: where the new run will be, or this machine."""
    stages: tuple[EarlierStage, ...]
    """The last one is it."""
    base_model: str
    """Hash of its base model's files."""
    recipe_text: str

    @property
    def run_id(self) -> str:
        return self.stages[-1].run_id

    @property
    def weights(self) -> Path:
        """On its head."""
        stage = self.stages[-1]
        return self.head.runs / stage.run_id / checkpoint_folder(stage.step) / "adapter" / ADAPTER_WEIGHTS

    def recipe(self, overrides: Mapping[str, str]) -> Recipe:
        """Its run's own recipe, with `overrides`. Raises RecipeError."""
        return parse_recipe(self.recipe_text, overrides, f"recipe of {self.run_id}")

    def refuse_other(self, recipe: Recipe) -> None:
        """LaunchError where a recipe has another adapter, or one on another model; where it needs this adapter twice,
        once to learn and once as it was."""
        self._refuse_as_reference(recipe)
        mine, wanted = self.recipe({}).compute_keys(), recipe.compute_keys()
        if differs := [key for key in IN_THE_WEIGHTS if mine.get(key) != wanted.get(key)]:
            differences = ", ".join(f"{key} {mine.get(key)}, not {wanted.get(key)}" for key in differs)
            raise LaunchError(
                f"--from-adapter {self.run_id}: it has {differences}; an adapter goes on as it is: leave --model out "
                "to take its own recipe"
            )

    def refuse_other_base(self, base_model: str) -> None:
        """LaunchError where this is another base model's hash."""
        if self.base_model != base_model:
            raise LaunchError(
                f"--from-adapter {self.run_id}: it was trained on another base model ({self.base_model[:12]}) than "
                f"the one that lies there ({base_model[:12]})"
            )

    def _refuse_as_reference(self, recipe: Recipe) -> None:
        """The reference of goal dpo is the policy that a stage begins with (arXiv 2305.18290, section 4); with the
        adapter off it would be the base model without what the earlier run has learned."""
        if recipe.is_dpo:
            home = "--here" if self.head.here else "--fetch"
            here = " --here" if self.head.here else ""
            raise LaunchError(
                f"--from-adapter {self.run_id}: goal = {DPO} needs what {self.run_id} has learned as its reference "
                f"too, unchanged; make it a model: fab merge {home} --run {self.run_id}, then fab train --model "
                f"./{LOCAL_RUNS}/{self.run_id}/merged --data FILE --set goal={DPO}{here}"
            )

    def put(self, head: Head, launch: Launch) -> None:
        """Weights and record into a new run's folder, compared with their checksum. Raises LaunchError."""
        files: dict[str, Path | str] = {RECORD: record_text(self.stages)}
        if self.head is head:
            head.ask(fs.copy, self.weights, f"{launch.run_dir}/{WEIGHTS}")
        else:
            files[WEIGHTS] = self.weights
        new_run.upload(head, launch, files)
        wanted = self.stages[-1].adapter
        if head.ask(fs.sha256, f"{launch.run_dir}/{WEIGHTS}") != wanted:
            raise LaunchError(f"--from-adapter {self.run_id}: {self.weights} is damaged on {self.head.name}")


def find(head: Head, run_id: str) -> EarlierAdapter:
    """The adapter of a run on the head, else of one that was fetched. LaunchError where neither has it."""
    if not is_run_id(run_id):
        raise LaunchError(f"--from-adapter {run_id}: the id of a run is expected, as fab status lists them")
    for place in (head, HereHead(LOCAL_RUNS)):
        if (step := runs.checkpoint_step(place, run_id)) is not None:
            return _read(place, run_id, step)
    raise LaunchError(f"--from-adapter {run_id}: no checkpoint of it is on {head.name} or below {LOCAL_RUNS.resolve()}")


def _read(head: Head, run_id: str, step: int) -> EarlierAdapter:
    folder = checkpoint_folder(step)
    try:
        sums = parse_sums(runs.file_of(head, run_id, f"{folder}/{SUMS}"))
        state = bounded_json(runs.file_of(head, run_id, f"{folder}/{STATE}"))
        before = parse_record(head.ask(fs.text, head.runs / run_id / RECORD) or "")
        digest = sums.get(f"adapter/{ADAPTER_WEIGHTS}")
        if digest is None:
            raise LaunchError(f"--from-adapter {run_id}: it trained the whole model, there is no adapter to go on with")
        stage = EarlierStage(run_id, step, digest, str(state["data"]))
        return EarlierAdapter(head, (*before, stage), str(state["base_model"]), runs.recipe_text(head, run_id))
    except (KeyError, TypeError, ValueError) as error:
        raise LaunchError(f"--from-adapter {run_id}: its checkpoint step-{step} cannot be read: {error}") from error
