"""Will it teach? What the data, the tokens and the schedule say. Pure."""

from __future__ import annotations

from training.cost.shape import HEAD
from training.data.limits import positions
from training.data.look.content import FEWEST, cure_of_marks
from training.data.statistics import MOST_CUT
from training.plan.fits import Check, Situation
from training.recipe.reading import with_changes
from training.recipe.recipe import Recipe
from training.text.counts import many, plain

PLAIN = {"text", "prompt/completion", "alpaca", "preference"}
"""Shapes of data that can be learned without a chat template."""

FEW_RECORDS = 100
MANY_EPOCHS = 10
LONG_WARMUP = 0.3
ROUNDED_UP = 1.05
"""By which whole steps may be more than the epochs that were asked for before it is said."""
FEW_TOKENS, MANY_TOKENS = 1000, 2_000_000
FEW_STEPS = 10
MANY_STEPS = 100
"""In an epoch: enough to give some of them up for a larger batch."""
TRUNCATED, MOSTLY = 0.05, MOST_CUT
DUPLICATES = 0.01


def records(it: Situation) -> Check:
    report = it.facts.report
    pairs = report.get("pairs", 0)
    return enough_records(
        it.recipe, pairs or report["samples"], report["rows"], paired=pairs > 0, held_out=it.facts.held_out
    )


def enough_records(recipe: Recipe, samples: int, rows: int, paired: bool, held_out: int = 0) -> Check:
    """Whether there is enough to learn from; also before the data are prepared."""
    amount = many(samples, "pair") if paired else str(samples)
    apart = f" ({held_out} more held out)" if held_out else ""
    value = f"{amount} to learn from{apart}, {many(rows, 'row')}, {many(recipe.global_batch, 'row')} a step"
    if samples < FEWEST:
        cure = (
            f"too few to teach anything but themselves; some hundreds are a start, at least {FEWEST} needed; "
            "--anyway starts all the same"
        )
        return Check("records", "error", value, cure, estimated=True)
    total = recipe.total_steps(rows)
    if rows < recipe.global_batch:
        more = f", and {few_steps(total)}" if few_steps(total) else ""
        cure = f"every step sees a row more than once{more}; --set global_batch={max(recipe.micro_batch, rows // 4)}"
        return Check("records", "warning", value, cure)
    if few := few_steps(total):
        return Check(
            "records", "warning", value, f"{few}; more epochs or steps, or a smaller global_batch, make them more"
        )
    if samples < FEW_RECORDS:
        return Check("records", "warning", value, "few; some hundreds teach a manner, thousands a skill")
    return Check("records", "ok", value)


def few_steps(total: int) -> str:
    """What is to be said of a run of so many steps; empty of one that may teach something."""
    if total >= FEW_STEPS:
        return ""
    return f"{many(total, 'step')} in all {'teaches' if total == 1 else 'teach'} next to nothing"


def skipped(it: Situation) -> Check:
    report = it.facts.report
    total = report["records"] + it.facts.held_out + report["bad"]
    value = f"{report['bad']} bad, {report['empty']} with nothing to learn, of {total}"
    if it.facts.share("empty") > MOSTLY:
        return Check("left out", "error", value, "most records lose every learned token; raise max_length")
    if report["bad"] or report["empty"]:
        return Check("left out", "warning", value, "fix them, or continue without them")
    return Check("left out", "ok", value)


def truncated(it: Situation) -> Check:
    share = it.facts.share("truncated")
    value = f"{share:.1%} of the records, cut to {it.recipe.max_length} tokens"
    cure = f"their ends are not learned; {_longer(it)}"
    if share > MOSTLY:
        return Check("truncated", "error", value, cure)
    if share > TRUNCATED:
        return Check("truncated", "warning", value, cure)
    return Check("truncated", "ok", value)


def _longer(it: Situation) -> str:
    """What cuts fewer."""
    longest = it.facts.report.get("longest_uncut", 0)
    most = min(longest, positions(it.facts.config) or longest)
    if most <= it.recipe.max_length:
        return "split them: the model takes no more"
    cuts = "cuts none" if most == longest else "is the most that the model takes"
    return f"--set max_length={most} {cuts}; or split them"


def duplicates(it: Situation) -> Check:
    count = it.facts.report.get("duplicates", 0)
    value = f"{many(count, 'record')} the same as one before" if count else "none"
    if count > DUPLICATES * it.facts.report["records"]:
        return Check(
            "duplicates", "warning", value, "take them out, unless they are to weigh more; fab data names them"
        )
    return Check("duplicates", "ok", value)


def leaks(it: Situation) -> Check:
    """Of records that are held out, whether they are learned all the same."""
    count, held_out = it.facts.report.get("leaked", 0), it.facts.held_out
    if not held_out:
        return Check("held out", "ok", "none")
    if not count:
        return Check("held out", "ok", f"{many(held_out, 'record')}, none of them in the training data too")
    value = f"{count} of {many(held_out, 'record')} in the training data too"
    return Check(
        "held out", "warning", value, "their loss is meaningless; remove the repeated records: fab data names them"
    )


def special_tokens(it: Situation) -> Check:
    """Of data that were rendered already, by a chat template or by hand."""
    report = it.facts.report
    if not report.get("marked"):
        return Check("special tokens", "ok", "none in the words of the records")
    value = f"{many(report['marked'], 'record')} with {', '.join(report['marks'])} in the words"
    return Check("special tokens", "warning", value, cure_of_marks({report["shape"]}))


def template(it: Situation) -> Check:
    report = it.facts.report
    if report["shape"] in PLAIN and not report["template"]:
        return Check("chat template", "ok", f"none, and {report['shape']} needs none")
    if not report["template"]:
        cure = "take the instruction-tuned model, whose tokenizer has one"
        return Check("chat template", "error", f"the tokenizer has none, the data are {report['shape']}", cure)
    return Check("chat template", "ok", f"the model's own, for {report['shape']} data")


def _plain_text(it: Situation) -> bool:
    return bool(it.facts.report["shape"] == "text")


def _turn_end_known(it: Situation) -> bool:
    return it.facts.report["end_of_turn_id"] in it.facts.stops


def _turn_end_trained(it: Situation) -> bool:
    """Whether its row of the head is: an embedding that is trained whole leaves the head as it was, a tied one too."""
    lora = it.recipe.lora
    whole = it.recipe.tuning == "full" or lora.saves(HEAD) or lora.adapts(HEAD)
    return whole or it.facts.report["end_of_turn"] in lora.trainable_tokens


def end_of_turn(it: Situation) -> Check:
    """A base model never ended a turn: LoRA beside its layers cannot teach it to, the token's own row can."""
    report = it.facts.report
    token = report["end_of_turn"]
    if _plain_text(it):
        return Check("end of turn", "ok", "plain text, there are no turns")
    if token is None:
        cure = "the tuned model may not stop; take a model whose template ends turns with a special token"
        return Check("end of turn", "warning", "the chat template writes none", cure)
    if not report["end_of_turn_learned"]:
        cure = "the model may not stop; raise max_length, or end each record with the assistant"
        return Check("end of turn", "warning", f"{token} is in no learned part", cure)
    if _turn_end_known(it):
        return Check("end of turn", "ok", f"{token}, which the base model ends with already")
    if _turn_end_trained(it):
        return Check("end of turn", "ok", f"{token}, whose row is trained")
    base = it.recipe.base_model
    cure = f"{base} is a base model: take the instruction-tuned one, or --set 'lora.trainable_tokens=[\"{token}\"]'"
    return Check("end of turn", "error", f"{token} is untrained: the tuned model would not stop", cure)


def padding_token(it: Situation) -> Check:
    """The loss is masked by length here, so it harms nobody where no row is padded and the model stops already."""
    report = it.facts.report
    if report["pad_id"] is None or report["pad_id"] not in {report["eos_id"], report["end_of_turn_id"]}:
        return Check("padding token", "ok", "not the end of a sequence")
    value = "pad = eos: what ends a sequence also fills it up"
    cure = "choose another token of its vocabulary: --set pad_token=TOKEN"
    stops = _plain_text(it) or _turn_end_known(it) or _turn_end_trained(it)
    harmless = stops and it.recipe.batching != "padded" and it.recipe.pad_token is None
    return Check("padding token", "warning" if harmless else "error", value, cure)


def short_warmup(total_steps: int) -> int:
    """Warm-up of a run that the recipe's own would take up: a tenth."""
    return total_steps // 10


def shortened(total_steps: int, warmup_steps: int) -> str:
    """What is said of a warm-up that the run is too short for."""
    if not short_warmup(total_steps):
        recipes = f"the recipe's {many(warmup_steps, 'step')} would last as long as the run's {total_steps}"
        return f"no warm-up: {recipes}"
    steps = f"{short_warmup(total_steps)} of {many(total_steps, 'step')}"
    return f"warm-up: {steps}; the recipe's {warmup_steps} would last as long as the run"


def for_rows(recipe: Recipe, rows: int) -> Recipe:
    """The recipe for so much data: with a shorter warm-up where its epochs are fewer steps than that."""
    total = recipe.total_steps(rows)
    if recipe.epochs is None or recipe.optimizer.warmup_steps < total:
        return recipe
    return with_changes(recipe, **{"optimizer.warmup_steps": short_warmup(total)})


def warmup(it: Situation) -> Check:
    steps, total = it.recipe.optimizer.warmup_steps, it.total_steps
    value = f"{steps} of {many(total, 'step')}"
    cure = f"--set optimizer.warmup_steps={short_warmup(total)}"
    if total > 1 and steps >= total:
        return Check("warm-up", "error", f"{value}: the learning rate never gets where it should", cure)
    if steps > LONG_WARMUP * total:
        return Check("warm-up", "warning", f"{value}: much of the run learns little", cure)
    return Check("warm-up", "ok", value)


def epochs(it: Situation) -> Check:
    passes = plain(it.epochs, 2)
    value = f"{passes} epoch{'s' * (passes != '1')} in {many(it.total_steps, 'step')}"
    requested = it.recipe.epochs
    if requested is not None and it.epochs > ROUNDED_UP * requested:
        value += f": {requested:g} asked for, but every step takes {many(it.recipe.global_batch, 'row')}"
    if it.epochs > MANY_EPOCHS:
        return Check("epochs", "warning", value, "1 to 5 are usual; more learns the records by heart", estimated=True)
    if it.epochs < 1:
        return Check("epochs", "ok", f"{value}: a part of the data is not seen")
    return Check("epochs", "ok", value)


def tokens_per_step(it: Situation) -> Check:
    tokens = tokens_each_step(it)
    value = f"{tokens:,.0f}"
    steps_each_epoch = it.facts.report["rows"] / it.recipe.global_batch
    if tokens < FEW_TOKENS and steps_each_epoch > MANY_STEPS:  # small data have few tokens a step or few steps
        return Check("tokens a step", "warning", value, "a noisy gradient; raise global_batch")
    if tokens > MANY_TOKENS:
        return Check("tokens a step", "warning", value, "few steps for much data; lower global_batch")
    return Check("tokens a step", "ok", value)


def tokens_each_step(it: Situation) -> float:
    """Real ones, without padding."""
    return it.facts.report["tokens"] / max(1, it.facts.report["rows"]) * it.recipe.global_batch
