"""What a run's folder says about one of its checkpoints, for its model card: at home, and where it is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from training.began_with import stages_of
from training.bounded import bounded_json, object_in
from training.errors import AdapterError
from training.evaluations import read_evaluations
from training.model_card import CardFacts
from training.run_folder import LAUNCH, METRICS, MODEL_SUMS, parse_metrics
from training.sums import ADAPTER_WEIGHTS, STATE, parse_sums
from training.verify import FetchError, whole_tensors

COUNTS = {"records": "records", "samples": "samples", "tokens": "tokens", "learned_tokens": "learned tokens"}
"""Of a data report, as the card calls them."""


def read_facts(run: Path, checkpoint: Path, merged: bool) -> CardFacts:
    """What the folder of a run says of the checkpoint. AdapterError where one of the two is not whole."""
    try:
        state = bounded_json((checkpoint / STATE).read_text(encoding="utf-8"))
        recipe = (run / "recipe.toml").read_text(encoding="utf-8")
        metrics = (run / METRICS).read_bytes() if (run / METRICS).exists() else b""
    except OSError as error:
        raise AdapterError(f"{run} is not a whole fetched run: {error}") from error
    final_loss, validation_loss = losses(metrics, state["step"])
    report = _report(run)
    return CardFacts(
        run_id=run.name,
        step=state["step"],
        recipe_text=recipe,
        base_model_hash=state["base_model"],
        data_hash=state["data"],
        final_loss=final_loss,
        validation_loss=validation_loss,
        evaluations=read_evaluations(run),
        merged=merged,
        end_of_turn=str(report["end_of_turn"]) if report.get("end_of_turn_learned") else "",
        sees=_sees(checkpoint / "adapter" / ADAPTER_WEIGHTS),
        began_with=[stage.words for stage in stages_of(run)],
        here=object_in(run / LAUNCH).get("here") is True,
        base_weights=_base_weights(run / MODEL_SUMS),
        data={name: report[key] for key, name in COUNTS.items() if report.get(key)},
    )


def losses(metrics: bytes, step: int) -> tuple[float | None, float | None]:
    """Training loss of the last step up to `step`, and the lowest validation loss until then, of a metrics.jsonl."""
    rows = [row for row in parse_metrics(metrics)[0] if row.get("step", 0) <= step]
    trained = [row["loss"] for row in rows if row.get("loss") is not None]
    validated = [row["validation_loss"] for row in rows if row.get("validation_loss") is not None]
    return (trained[-1] if trained else None), min(validated, default=None)


def _base_weights(sums: Path) -> dict[str, str]:
    """Those of a base model's SHA256SUMS; nothing where the run has none that can be read."""
    try:
        found = parse_sums(sums.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {name: digest for name, digest in found.items() if name.endswith(".safetensors")}


def _sees(weights: Path) -> bool:
    """Whether an adapter is of a text part beside others, by the names in it."""
    try:
        return any(".language_model." in name for name in whole_tensors(weights)[0])
    except (OSError, FetchError):  # what is damaged is told when it is verified
        return False


def _report(run: Path) -> dict[str, Any]:
    """What became of the run's data."""
    found: dict[str, Any] = object_in(run / "data" / "report.json").get("report", {})
    return found
