"""Will it teach? What the data, the tokens and the schedule say. Pure."""

from __future__ import annotations

from training.plan.situation import Check, Situation

PLAIN = {"text", "prompt/completion", "preference"}
"""Shapes of data that can be learned without a chat template."""

FEWEST_RECORDS = 30
"""Below, a model learns these records by heart and nothing besides."""
FEW_RECORDS = 100
MANY_EPOCHS = 10
LONG_WARMUP = 0.3
FEW_TOKENS, MANY_TOKENS = 1000, 2_000_000
MANY_STEPS = 100
"""In an epoch: enough to give some of them up for a larger batch."""
TRUNCATED, MOSTLY = 0.05, 0.5


def records(it: Situation) -> Check:
    report = it.facts.report
    pairs, rows = report.get("pairs", 0), report["rows"]
    samples = pairs or report["samples"]
    value = f"{samples} {'pairs ' if pairs else ''}to learn from, {rows} rows, {it.recipe.global_batch} rows a step"
    if samples < FEWEST_RECORDS:
        cure = f"too few to teach anything but themselves; some hundreds are a start, at least {FEWEST_RECORDS} needed"
        return Check("records", "error", value, cure, estimated=True)
    if rows < it.recipe.global_batch:
        cure = f"every step sees a row more than once; --set global_batch={max(it.recipe.micro_batch, rows // 4)}"
        return Check("records", "warning", value, cure)
    if samples < FEW_RECORDS:
        return Check("records", "warning", value, "few; some hundreds teach a manner, thousands a skill")
    return Check("records", "ok", value)


def skipped(it: Situation) -> Check:
    report = it.facts.report
    given = report["records"] + report["bad"]
    value = f"{report['bad']} bad, {report['empty']} with nothing to learn, of {given}"
    if it.facts.share("empty") > MOSTLY:
        return Check("left out", "error", value, "most records lose every learned token; raise max_length")
    if report["bad"] or report["empty"]:
        return Check("left out", "warning", value, "mend them, or go on without")
    return Check("left out", "ok", value)


def truncated(it: Situation) -> Check:
    share = it.facts.share("truncated")
    value = f"{share:.1%} of the records, cut to {it.recipe.max_length} tokens"
    cure = "their ends are not learned; raise max_length, or split them"
    if share > MOSTLY:
        return Check("truncated", "error", value, cure)
    if share > TRUNCATED:
        return Check("truncated", "warning", value, cure)
    return Check("truncated", "ok", value)


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
    lora = it.recipe.lora
    return (
        it.recipe.tuning == "full"
        or it.facts.report["end_of_turn"] in lora.trainable_tokens
        or bool({"lm_head", "embed_tokens"} & set(lora.modules_to_save))
    )


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


def warmup(it: Situation) -> Check:
    steps, total = it.recipe.optimizer.warmup_steps, it.total_steps
    value = f"{steps} of {total} steps"
    cure = f"--set optimizer.warmup_steps={short_warmup(total)}"
    if total > 1 and steps >= total:
        return Check("warm-up", "error", f"{value}: the learning rate never gets where it should", cure)
    if steps > LONG_WARMUP * total:
        return Check("warm-up", "warning", f"{value}: much of the run learns little", cure)
    return Check("warm-up", "ok", value)


def epochs(it: Situation) -> Check:
    value = f"{it.epochs:.2g} epochs in {it.total_steps} steps"
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
