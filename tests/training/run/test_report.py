"""The report of a run, looked at in a real headless browser."""

from __future__ import annotations

import html
import json
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import get_args

import pytest

from training.data.file_names import NAMES, names_text
from training.laptop.fetch import make_page
from training.laptop.head_node import HereHead
from training.laptop.new_run import code_files, plan_text
from training.laptop.open_cluster import Session, language_of
from training.models.names import load_recipe
from training.node.metrics import plots as plot_module
from training.node.metrics import run_tables
from training.node.metrics.plots import MOST_POINTS, Plot, draw, means, plots
from training.node.metrics.report import content, make_report, marks_of
from training.node.metrics.run_tables import duration, plan_against_actual
from training.node.metrics.steps import EvaluationMetrics, StepMetrics, append
from training.node.metrics.timeline import Lane, lanes
from training.node.supervision.failure import ASKED
from training.run.causes import Cause
from training.run.evaluations import ALL, ALL_OF_ONE, ONE, PART, SCORES, trained_on
from training.run.events import EVENTS, Resumed, Started, Told, row_of
from training.run.folder import State, Status, status_text
from training.run.history import Loss, note_end, note_loss, note_start, read_starts
from training.run.launch import Host, Launch, launch_text, parse_launch
from training.text.catalogue import EMPTY_ANSWER, ENGLISH, ZH, Words
from training.text.files import sha256_of

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")
ROOT = Path(__file__).parents[3]
STEPS, EVERY = 40, 10
EVIL = "损失不收敛 <script>alert('x')</script> & \"<b>\""
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--hide-scrollbars",
]


BEGAN = 1_767_225_600.0


def loss(step: int) -> float:
    return 1.2 + 1.6 * math.exp(-step / 12)


def make_run(run: Path, steps: int = STEPS, language: str = "en") -> Path:
    """A run folder as a head has it at the end."""
    run.mkdir(parents=True)
    for step in range(1, steps + 1):
        metrics = StepMetrics(
            step, steps, loss(step), 1e-4 * (1 + math.cos(math.pi * step / steps)) / 2, 0.4 + 0.3 / step,
            2000 * step, 1800.0 + 50 * math.sin(step), 4 * step, step / 20, 5.25, 1.1, "2026-01-01T00:00:00+00:00",
            token_accuracy=0.5 + step / 200, learned_tokens=900, padded_tokens_per_s=2000.0, mfu=0.31, hfu=0.45,
            communication_share=0.12, gpu_utilization=0.93,
        )  # fmt: skip
        append(run / "metrics.jsonl", metrics)
        if step % EVERY == 0:
            value = loss(step) + 0.1 + 0.004 * abs(step - 30)
            evaluation = EvaluationMetrics(step, value, math.exp(value), 0.6, 50, 2.0, "2026-01-01T00:00:00+00:00")
            append(run / "metrics.jsonl", evaluation)
    predicted = {"memory_gib": 5.0, "step_s": 1.0, "minutes": 75, "tokens_per_step": 2000, "total_steps": steps}
    hosts = tuple(Host(f"te{n}", f"10.0.0.{n}", 1, "ecs.gn7i", "cn-hangzhou-k", 6.25) for n in (1, 2))
    costs = {"price_h": 12.5, "currency": "CNY", "language": language}
    launch = Launch(run.name, str(run), hosts, "training.node.finetune", (), "python", {}, **costs)
    data = {"shape": "messages", "content_hash": "c" * 64}
    (run / "plan.json").write_text(plan_text(launch, "tiny", "b" * 64, data, predicted), encoding="utf-8")
    (run / "launch.json").write_text(launch_text(launch), encoding="utf-8")
    words = ("第一行", "FloatingPointError: step 41")
    status = Status(run.name, "failed", EVIL, started=BEGAN, ended=BEGAN + 5400, last_lines=words, price_h=12.5)
    (run / "status.json").write_text(status_text(status.changed(currency="CNY", spent_before=1.25)), encoding="utf-8")
    write(run / "data" / "report.json", {"report": {"shape": "messages", "records": 160, "end_of_turn": "<|im_end|>"}})
    write(run / "versions.json", {"torch": "2.13.0", "transformers": "5.23.0"})
    (run / "recipe.toml").write_text(load_recipe("tiny", {"licence": '"小模型，用于测试"'}).to_toml(), encoding="utf-8")
    for step in (30, 40):
        state = {"validation_loss": loss(step), "data": "d" * 64}
        write(run / "checkpoints" / f"step-{step}" / "trainer_state.json", state)
    (run / "checkpoints" / ".tmp-step-50").mkdir()
    (run / "checkpoints" / "best").write_text("step-30\n")
    (run / "logs").mkdir()
    (run / EVENTS).write_text(row_of(Told(0, Started(7)), BEGAN) + row_of(Told(0, Resumed(20, 4)), BEGAN))
    return run


def write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


@pytest.fixture(scope="module", autouse=True)
def drawn_once():
    """A plot of the same run is the same: matplotlib takes a tenth of a second for each, and a page has eight."""
    real, known = plot_module._svg, {}

    def svg(*what):
        key = repr(what)
        if key not in known:
            known[key] = real(*what)
        return known[key]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(plot_module, "_svg", svg)
        yield


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    return make_report(make_run(tmp_path_factory.mktemp("head") / "tiny-20260101-000000"))


@pytest.fixture(scope="module")
def chromium() -> str:
    found = shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("needs a browser: apt-get install chromium")
    return found


def browse(chromium: str, page: Path, folder: Path, *flags: str) -> str:
    """What the browser says, with a profile of its own that starts empty."""
    argv = [chromium, *FLAGS, f"--user-data-dir={folder / 'profile'}", *flags, page.as_uri()]
    env = {**os.environ, "HOME": str(folder)}
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=120, env=env).stdout


def asked_by_the_page(chromium: str, page: Path, folder: Path) -> set[str]:
    """What a page, and not the browser for itself, asked the network for."""
    folder.mkdir()
    browse(chromium, page, folder, "--dump-dom", f"--log-net-log={folder / 'net.json'}")
    events = json.loads((folder / "net.json").read_text(encoding="utf-8"))["events"]
    asked = [event.get("params", {}) for event in events]
    urls = {a["url"] for a in asked if "url" in a and str(a.get("initiator", "")).startswith(("null", "file:"))}
    return {url for url in urls if not url.startswith(("file:", "data:"))}


class Page(HTMLParser):
    """Texts and marked curves of a page, and every address in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.addresses: list[str] = []
        self.tags: list[str] = []
        self.curves: dict[str, list[tuple[float, float]]] = {}
        self.svg = self.group = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.tags.append(tag)
        self.addresses += [v or "" for k, v in attrs if k in {"src", "href", "xlink:href", "action", "data", "srcset"}]
        if tag == "svg":
            self.svg = values["aria-label"]
        if tag == "g":
            self.group = values.get("id", "")
        if tag == "path" and f"{self.svg}/{self.group}" not in self.curves and values.get("clip-path"):
            points = re.findall(r"[ML] (\S+) (\S+)", values["d"])
            self.curves[f"{self.svg}/{self.group}"] = [(float(x), float(y)) for x, y in points]

    def handle_data(self, data):
        if data.strip():
            self.texts.append(data.strip())


@pytest.fixture(scope="module")
def dom(chromium, report, tmp_path_factory) -> Page:
    """The page as the browser understood it."""
    return Page(browse(chromium, report, tmp_path_factory.mktemp("browser"), "--dump-dom"))


def test_the_browser_shows_every_plot_with_its_labels(dom):
    titles = [
        *("Loss", "Token accuracy", "Learning rate", "Gradient norm", "Speed", "Memory", "Utilisation", "Waiting"),
    ]
    assert dom.tags.count("svg") == len(titles) and set(titles) <= set(dom.texts)
    labels = {"training", "validation", "tokens/s", "useful", "with padding", "GiB", "planned", "MFU", "HFU", "step"}
    assert labels <= set(dom.texts)


def test_the_curves_are_the_steps_and_evaluations_of_the_run(dom):
    training, validation = dom.curves["Loss/loss"], dom.curves["Loss/validation-validation_loss"]
    assert (len(training), len(validation)) == (STEPS, STEPS // EVERY)
    # what stands between two points of the page must be what stands between their losses, on one scale for both
    scale = (training[-1][1] - training[0][1]) / (loss(STEPS) - loss(1))
    for step, (_, y) in enumerate(training, 1):
        assert y == pytest.approx(training[0][1] + scale * (loss(step) - loss(1)), abs=0.01)
    assert validation[1][1] == pytest.approx(training[0][1] + scale * (loss(20) + 0.14 - loss(1)), abs=0.01)
    assert validation[1][0] == pytest.approx(training[19][0], abs=0.01)


def test_what_the_run_says_is_text_and_never_markup(dom, report):
    assert EVIL in dom.texts
    assert any(text.startswith("第一行") for text in dom.texts) and "<|im_end|>" in dom.texts
    assert {"script", "b", "iframe", "object", "link-"} & set(dom.tags) == set()
    assert html.escape("<script>") in report.read_text(encoding="utf-8")


def test_plan_cost_and_resumes_are_told(dom):
    joined = " | ".join(dom.texts)
    assert (
        "memory of a rank | 5 GiB | 5.25 GiB | 105%" in joined
        and "a step of the last start | 1 s | 1.1 s | 110%" in joined
    )
    assert "the whole run | 1 h 15 min | 1 h 30 min | 120%" in joined and "20.00 CNY" in dom.texts
    assert "Resumed from step 20, which 4 ranks had saved." in dom.texts
    assert "te1" in dom.texts


def test_the_page_asks_nobody_for_anything(report, chromium, tmp_path):
    text = report.read_text(encoding="utf-8")
    assert re.findall(r"(?i)https?:|//[a-z]+\.|@import|url\((?!#)|<script|<iframe|<img", html.unescape(text)) == [
        "<script"  # the escaped one of the run's own words
    ]
    assert {address[:1] for address in Page(text).addresses} <= {"#", "d"}
    beacon = tmp_path / "beacon.html"
    beacon.write_text('<img src="http://elsewhere.invalid/x.png">')
    assert asked_by_the_page(chromium, beacon, tmp_path / "1") == {"http://elsewhere.invalid/x.png"}
    assert asked_by_the_page(chromium, report, tmp_path / "2") == set()


@pytest.mark.parametrize(("flags", "dark"), [([], False), (["--blink-settings=preferredColorScheme=0"], True)])
def test_the_page_is_painted_in_light_and_in_dark(chromium, report, tmp_path, flags, dark):
    import matplotlib.image

    shot = tmp_path / "shot.png"
    browse(chromium, report, tmp_path, f"--screenshot={shot}", "--window-size=1200,1600", *flags)
    pixels = matplotlib.image.imread(shot)[..., :3]
    assert (pixels[5, 5].mean() < 0.2) == dark
    assert pixels.std() > 0.05, "a page of one colour shows nothing"
    curves = (abs(pixels[..., 2] - pixels[..., 0]) > 0.35).sum()
    assert curves > 2000, "the coloured curves are missing"


def test_on_a_phone_nothing_is_wider_than_the_screen(chromium, whole, tmp_path):
    probe = tmp_path / "probe.html"
    # the page in a frame as wide as a phone; the frame's own page says how wide its content would like to be
    script = "document.title = f.contentDocument.documentElement.scrollWidth"
    probe.write_text(f'<iframe id=f width=390 height=800 src="{whole.as_uri()}" onload="{script}"></iframe>')
    out = browse(chromium, probe, tmp_path, "--dump-dom", "--allow-file-access-from-files")
    title = re.search(r"<title>(\d+)</title>", out)
    assert title and int(title[1]) <= 390


def test_a_run_without_anything_still_gets_its_page(tmp_path):
    run = tmp_path / "tiny-20260101-000000"
    run.mkdir()
    (run / "plan.json").write_text('{"half": ')
    done = subprocess.run(
        [sys.executable, "-m", "training.node.metrics.report", "--run", str(run)],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == str(run / "report.html")
    text = (run / "report.html").read_text(encoding="utf-8")
    assert "No optimizer step was done." in text and "not known" in text


def test_a_long_run_is_drawn_by_the_means_of_neighbours():
    rows = [{"step": n, "loss": float(n)} for n in range(1, 2 * MOST_POINTS + 2)]
    drawn = draw(plots({})[0], rows, [])
    assert drawn is not None and drawn.mean_of == 3
    group = re.search(r'<g id="loss">.*?d="([^"]*)"', drawn.svg, re.DOTALL)
    assert group and len(re.findall("[ML]", group[1])) == math.ceil(len(rows) / 3)
    assert means([(1, 1.0), (2, 3.0), (3, 5.0)], 2) == [(2, 2.0), (3, 5.0)]


def test_what_was_never_measured_is_not_drawn():
    assert draw(Plot("Utilisation", "%", plots({})[-2].curves), [{"step": 1, "mfu": None}], []) is None


def test_a_curve_that_is_alone_among_those_that_might_be_there_has_its_name():
    rows = [{"step": step, "gpu_utilization": 0.25} for step in (1, 2)]
    drawn = draw(plots({})[-2], rows, [])
    assert drawn is not None and ">GPU busy</text>" in drawn.svg and ">MFU</text>" not in drawn.svg


def test_waiting_is_not_drawn_as_use_of_the_cards():
    drawn = [draw(plot, [{"step": 1, "communication_share": 0.25}], []) for plot in plots({})]
    assert [one.title for one in drawn if one] == ["Waiting"]


def test_of_two_speeds_that_are_the_same_both_are_seen():
    speed = next(plot for plot in plots({}) if plot.title == "Speed")
    rows = [{"step": step, "tokens_per_s": 9.0, "padded_tokens_per_s": 9.0} for step in (1, 2)]
    svg = draw(speed, rows, []).svg
    useful, padded = (
        svg.partition(f'<g id="{key}">')[2].partition("</g>")[0] for key in ("tokens_per_s", "padded_tokens_per_s")
    )
    assert "stroke-dasharray" in padded and "stroke-dasharray" not in useful
    assert svg.index('id="tokens_per_s"') < svg.index('id="padded_tokens_per_s"')


def test_values_that_were_not_finite_leave_a_gap_and_no_error(tmp_path):
    run = make_run(tmp_path / "tiny-20260101-000000", steps=3)
    bad = StepMetrics(4, 4, math.nan, 1e-4, math.inf, 1, 1.0, 1, 1.0, 1.0, 1.0, "t", skipped=True)
    append(run / "metrics.jsonl", bad)
    assert "tiny-20260101-000000" in make_report(run).read_text(encoding="utf-8")


def test_without_a_price_no_cost_is_made_up(tmp_path):
    run = make_run(tmp_path / "tiny-20260101-000000", steps=2)
    (run / "status.json").write_text(status_text(Status(run.name, "finished", started=BEGAN, ended=BEGAN + 60)))
    assert ("cost", "not known", "") in content(run, BEGAN + 60)["tiles"]


@pytest.mark.parametrize(
    ("language", "told"), [("en", ("cost", "nothing billed", "this machine")), ("zh", ("费用", "不计费", "本机"))]
)
def test_a_run_on_ones_own_machine_costs_nothing(tmp_path, language, told):
    run = make_run(tmp_path / "tiny-20260101-000000", steps=2, language=language)
    launch = parse_launch((run / "launch.json").read_text())
    (run / "launch.json").write_text(launch_text(replace(launch, here=True, price_h=None)))
    (run / "status.json").write_text(status_text(Status(run.name, "finished", started=BEGAN, ended=BEGAN + 60)))
    assert told in content(run, BEGAN + 60)["tiles"]


@pytest.mark.parametrize(
    ("language", "losses", "won"),
    [
        (
            "en",
            {"best validation loss (DPO)", "language-modelling loss of the chosen answers"},
            "pairs: won against the base | - | 75.0%",
        ),
        (
            "zh",
            {"最低验证损失（DPO）", "较好的回答的语言模型损失"},
            "偏好对：胜过基座的比例 | - | 75.0%",
        ),
    ],
)
def test_the_two_losses_of_pairs_have_names_of_their_own_and_what_was_won_is_told(tmp_path, language, losses, won):
    run = with_everything(make_run(tmp_path / "tiny-20260101-000000", language=language))
    for step in (10, 40):
        append(run / "metrics.jsonl", EvaluationMetrics(step, 0.5, None, None, 50, 2.0, "t", reward_accuracy=0.8))
    split = json.loads((run / "evaluation.json").read_text())
    tuned = {**split["tuned"], "win_rate": 0.75, "win_margin": 1.5}
    write(run / "evaluation.json", {"base": {**split["base"], "pairs": 8}, "tuned": tuned})
    texts = Page(make_report(run).read_text(encoding="utf-8")).texts
    assert losses <= set(texts) and not {"held-out loss", "validation loss", "验证损失"} & set(texts)
    assert won in " | ".join(texts) and "1.500" in texts


def test_a_chinese_page_has_no_blank_behind_a_full_stop_and_calls_a_share_as_the_terminal_does(whole):
    text = "".join(Page(whole.read_text(encoding="utf-8")).texts)
    assert "%" in text and " %" not in text and "。 " not in text
    assert "50.0%" in text


def test_a_run_that_goes_on_counts_its_time_until_now(tmp_path):
    run = make_run(tmp_path / "tiny-20260101-000000", steps=2)
    write(run / "status.json", {"state": "running", "started": 1000.0, "ended": None})
    assert ("time", "2 min 05 s", "of the last start") in content(run, 1125.0)["tiles"]


def test_the_supervisor_may_say_the_end_before_it_is_written(tmp_path):
    run = make_run(tmp_path / "tiny-20260101-000000", steps=2)
    end = json.dumps({"state": "finished", "reason": "", "started": 1000.0, "ended": 1060.0})
    argv = [sys.executable, "-m", "training.node.metrics.report", "--run", str(run), "--status", "-"]
    subprocess.run(argv, cwd=ROOT, input=end, text=True, check=True, capture_output=True)
    texts = Page((run / "report.html").read_text(encoding="utf-8")).texts
    assert "finished" in texts and "failed" not in texts and "1 min 00 s" in texts


def test_the_template_travels_with_the_code():
    assert "training/node/metrics/report.html.jinja" in code_files()


def with_everything(run: Path) -> Path:
    """The same with two starts, an adapter, held-out answers, and what was seen in its data."""
    launch = parse_launch((run / "launch.json").read_text())
    note_start(run, replace(launch, command="fab train --model tiny --data mine.jsonl"), BEGAN)
    note_end(run, BEGAN + 3600)
    note_start(run, replace(launch, command="fab train --resume"), BEGAN + 7200)
    note_end(run, BEGAN + 9000)
    status = Status(run.name, "stopped", started=BEGAN + 7200, ended=BEGAN + 9000, price_h=12.5, spent_before=12.5)
    (run / "status.json").write_text(status_text(status.changed(currency="CNY")))
    for step in (30, 40):
        folder = run / "checkpoints" / f"step-{step}"
        write(folder / "trainer_state.json", {"step": step, "base_model": "b" * 64, "data": "d" * 64})
        write(folder / "adapter" / "adapter_config.json", {"r": 16})
    (data := run / "data" / "train.jsonl").write_text("{}")
    survey = {"name": "another.jsonl", "size": 2, "shapes": {"messages": 1}, "bad": 2, "sha256": sha256_of(data)}
    (data.parent / NAMES).write_text(names_text({"data/train.jsonl": data}, data, "data/"))
    counts = {"records": 9, "samples": 9, "tokens": 90, "learned_tokens": 40}
    counts |= {"rows": 3, "efficiency": 0.9, "empty": 1}
    look = {"survey": {"files": [survey], "bad": 2, "bad_shown": ["train.jsonl line 2: bad"]}}
    look |= {"bad": 12, "bad_shown": ["train.jsonl line 2: bad"], "bad_more": 11, "skipped": True}
    write(run / "data" / "prepared" / "look.json", look)
    report = {**counts, "shape": "messages", "longest": 99, "truncated": 2, "bad": 12, "end_of_turn": "<|im_end|>"}
    write(run / "data" / "report.json", {"report": report, "validation": report})
    example = {"asked": "what is it?", "wanted": "a thing", "said": "no idea"}
    base = {"loss": 2.0, "exact_match": 0.0, "rouge_l": 0.25, "examples": [example]}
    tuned = {"loss": 1.0, "exact_match": 0.5, "rouge_l": 0.75, "examples": [{**example, "said": "a thing indeed"}]}
    write(run / "evaluation.json", {"base": base, "tuned": tuned})
    return run


@pytest.fixture(scope="module", params=["en", "zh"])
def whole(request, tmp_path_factory) -> Path:
    """The report of a run that has everything, in each language."""
    run = make_run(tmp_path_factory.mktemp(request.param) / "tiny-20260101-000000", language=request.param)
    return make_report(with_everything(run))


def test_a_report_says_what_was_typed_on_what_and_for_how_long_over_all_starts(tmp_path):
    found = content(with_everything(make_run(tmp_path / "tiny-20260101-000000")), BEGAN)
    assert found["commands"] == ["fab train --model tiny --data mine.jsonl", "fab train --resume"]
    assert ("time", "1 h 30 min", "over 2 starts") in found["tiles"]
    assert ("cost", "18.75 CNY", "12.50 CNY an hour") in found["tiles"]
    assert found["machines"]["all"] == "12.50 CNY" and "an hour" in found["machines"]["heads"]
    assert found["machines"]["rows"][1] == ("te2", "ecs.gn7i", "cn-hangzhou-k", 1, "6.25 CNY")


def test_what_an_hour_costs_is_said_once_in_each_language(whole):
    assert len(re.findall(r"12\.50 CNY an hour|每小时 12\.50 CNY", page := whole.read_text("utf-8"))) == 2
    assert not re.search(r"an hour an hour|每小时[^<]* an hour", page)


def test_a_report_names_the_file_whose_answers_it_shows_and_calls_only_the_split_held_out(tmp_path):
    run = with_everything(make_run(tmp_path / "tiny-20260101-000000"))
    split = json.loads((run / "evaluation.json").read_text())
    base, tuned = {**split["base"], "samples": 8}, {**split["tuned"], "samples": 8}
    other = {"of": "eight.jsonl", "learned_before": 5, "base": base, "tuned": {**tuned, "loss": 0.125}}
    write(run / "evaluation-of-0123456789ab.json", other)
    text = make_report(run).read_text(encoding="utf-8")
    before, _, after = text.partition("Answers on eight.jsonl")
    assert "Held-out answers" in before and "held-out loss" in before and "0.125" not in before
    assert (
        "5 of 8 were trained on: the loss is too good for these." in after
        and "0.125" in after
        and "held-out loss" not in after
    )


@pytest.mark.parametrize(
    ("here", "command"),
    [
        (True, "fab evaluate --run {run} --here"),
        (False, "fab evaluate --run {run} && fab fetch --run {run}"),
    ],
)
def test_a_report_of_a_run_that_was_not_evaluated_says_what_does_that(tmp_path, here, command):
    run = with_everything(make_run(tmp_path / "tiny-20260101-000000"))
    launch = parse_launch((run / "launch.json").read_text())
    (run / "launch.json").write_text(launch_text(replace(launch, here=here)))
    (run / "data" / "prepared" / "validation").mkdir()
    split = json.loads((run / "evaluation.json").read_text())
    assert "fab evaluate" not in make_report(run).read_text(encoding="utf-8")

    (run / "evaluation.json").unlink()
    write(run / "evaluation-of-0123456789ab.json", {**split, "of": "eight.jsonl"})
    page = Page(make_report(run).read_text(encoding="utf-8"))
    assert command.format(run=run.name) in page.texts and "Held-out answers" in page.texts

    (run / "data" / "prepared" / "validation").rmdir()
    assert "fab evaluate" not in make_report(run).read_text(encoding="utf-8")


def test_before_there_is_a_checkpoint_a_report_asks_for_no_evaluation(tmp_path):
    run = with_everything(make_run(tmp_path / "tiny-20260101-000000"))
    (run / "data" / "prepared" / "validation").mkdir()
    (run / "evaluation.json").unlink()
    assert content(run, BEGAN)["to_evaluate"]
    shutil.rmtree(run / "checkpoints")
    assert not content(run, BEGAN)["to_evaluate"]


@pytest.mark.parametrize(
    ("learned", "samples", "said"),
    [
        (None, 8, ""),
        (0, 8, ""),
        (1, 40, "1 of 40 was trained on: the loss is too good for it."),
        (39, 40, "39 of 40 were trained on: the loss is too good for these."),
        (40, 40, "All 40 were trained on: their loss tells nothing about new records."),
        (1, 1, "The only one was trained on: its loss tells nothing about new records."),
    ],
)
def test_a_loss_says_nothing_about_new_records_only_where_all_were_trained_on(learned, samples, said):
    text, numbers = trained_on({"of": "a.jsonl", "learned_before": learned, "base": {"samples": samples}})
    assert ENGLISH(text, **numbers) == said


@pytest.mark.parametrize(("language", "said"), [("en", "(an empty answer)"), ("zh", "（空的回答）")])
def test_an_empty_answer_is_said_in_words(tmp_path, language, said):
    run = with_everything(make_run(tmp_path / "tiny-20260101-000000", language=language))
    split = json.loads((run / "evaluation.json").read_text())
    split["base"]["examples"][0]["said"] = ""
    write(run / "evaluation.json", split)
    text = make_report(run).read_text(encoding="utf-8")
    assert f'<div class="said base">{said}</div>' in text and text.count(said) == 1


def test_a_report_says_what_was_learned_from_with_checksums_and_what_was_held_out(tmp_path):
    run = with_everything(make_run(tmp_path / "tiny-20260101-000000"))
    found = content(run, BEGAN)
    assert found["files"] == [("train.jsonl", "2 B", "1", sha256_of(run / "data" / "train.jsonl"))]
    assert ("tokens learned from", "40", "40") in found["data"]
    (measured,) = found["answers"]
    (shown,) = measured["shown"]
    assert (shown["base"], shown["tuned"], shown["wanted"]) == ("no idea", "a thing indeed", "a thing")
    assert 'from_pretrained(base, "runs/tiny-20260101-000000/adapter")' in "\n".join(found["loading"][0])


def test_a_report_calls_the_data_as_their_user_does(tmp_path):
    run = with_everything(make_run(tmp_path / "tiny-20260101-000000", language="zh"))
    look = json.loads((kept := run / "data" / "prepared" / "look.json").read_text())
    look["survey"]["files"][0]["size"] = 15772
    write(kept, look)
    (run / "data" / NAMES).write_text(
        names_text({"data/train.jsonl": (own := Path("/home/anna/对话.jsonl"))}, own, "data/")
    )
    text = make_report(run).read_text("utf-8")
    assert "anna" not in text and look["survey"]["files"][0]["name"] not in text
    assert content(run, BEGAN)["files"][0][:2] == ("对话.jsonl", "15.8 kB")
    write(kept, {"survey": 1})
    assert content(run, BEGAN)["files"] == []


def test_bad_records_are_of_neither_part_and_stand_once():
    report = {"records": 18, "bad": 2, "empty": 1}
    rows = {row[0]: row[1:] for row in run_tables.data(report, report | {"records": 2})}
    assert rows["left out: bad"] == ("2", "")
    assert rows["left out: nothing to learn"] == ("1", "1") and rows["records"] == ("18", "2")


def test_the_longest_of_pairs_is_called_a_pair():
    assert run_tables.data({"longest": 206}, {}) == [("longest sample after cutting, tokens", "206", "")]
    assert run_tables.data({"longest": 219, "pairs": 40}, {}) == [("longest pair in its row, tokens", "219", "")]


def test_a_run_that_has_not_ended_is_held_against_the_steps_that_it_made():
    row = {"step": 65, "total_steps": 200, "memory_gib": 1.0, "step_s": 1.0, "tokens": 650}
    found = plan_against_actual({"minutes": 30, "total_steps": 300, "step_s": 6.0}, [row], 600.0)
    rows = {name: values for name, *values in found}
    assert rows["steps"] == ["200", "65", "32%"]
    assert rows["the steps made"] == ["6 min 30 s", "10 min 00 s", "154%"]
    whole = plan_against_actual({"minutes": 30, "total_steps": 300}, [row | {"step": 200}], 600.0)
    assert ["the whole run", "20 min 00 s", "10 min 00 s", "50%"] in [list(each) for each in whole]
    assert "a step" in rows
    gone_on = plan_against_actual({"step_s": 6.0}, [row], 600.0, resumed=[60])
    assert "a step of the last start" in [name for name, *_ in gone_on]


def test_where_a_run_was_gone_on_with_and_cut_short_is_marked_in_every_curve(whole):
    text = whole.read_text(encoding="utf-8")
    assert text.count('<g id="resume-20">') == text.count('<g id="stop-40">') == text.count("<svg") == 8


def test_each_time_that_steps_were_done_again_is_marked_as_a_stop():
    steps = [{"step": step} for step in (1, 2, 3, 4, 3, 4, 5, 6, 7, 8)]
    marks = marks_of([2, 6], steps, "finished")
    assert [(mark.step, mark.stop) for mark in marks] == [(2, False), (6, False), (4, True)]
    assert [mark.step for mark in marks_of([], steps, "stopped")] == [4, 8]


def test_starts_are_shown_with_their_machines_and_what_a_change_took(tmp_path):
    run = make_run(tmp_path / "tiny-20260101-000000", steps=2)
    launch = parse_launch((run / "launch.json").read_text())
    more = replace(launch, hosts=(*launch.hosts, replace(launch.hosts[0], name="te3")))
    note_start(run, more, BEGAN)
    note_end(run, BEGAN + 3600)
    note_start(run, launch, BEGAN + 3600, EVIL)
    note_loss(run, Loss(3, 65.0, 0.42))
    starts = read_starts(run)
    page = Page(make_report(run, language="zh").read_text(encoding="utf-8"))
    assert {"te1, te2, te3", "1 小时 00 分", EVIL, "步数：3，1 分 05 秒，0.42 CNY"} <= {*page.texts}
    halves = ((0.0, 66.667), (66.667, 33.333))
    assert lanes(starts, BEGAN + 5400) == [Lane("te1", halves), Lane("te2", halves), Lane("te3", halves[:1])]


def test_a_run_of_one_step_is_drawn_over_whole_steps():
    drawn = draw(plots({})[0], [{"step": 1, "loss": 2.0}], [])
    axis = drawn.svg.partition('id="matplotlib.axis_1"')[2].partition('id="matplotlib.axis_2"')[0]
    assert re.findall(r">([^<>\s]+)</text>", axis) == ["0", "1", "2", "step"]


def test_a_duration_below_a_minute_has_seconds_alone():
    assert [duration(seconds, ENGLISH) for seconds in (32.4, 59.4, 60, 3600)] == [
        *("32 s", "59 s", "1 min 00 s", "1 h 00 min"),
    ]
    assert duration(32, Words("zh")) == "32 秒"


@pytest.mark.parametrize(("saved", "said"), [(True, "停止前保存了检查点"), (False, "以上一个检查点为准")])
def test_why_a_run_was_stopped_is_said_in_the_language_of_the_page(tmp_path, saved, said):
    run = make_run(tmp_path / "tiny-20260101-000000", language="zh")
    cause = Cause("asked", saved=saved)
    (run / "status.json").write_text(status_text(Status(run.name, "stopped", reason=ASKED[saved], cause=cause)))
    assert said in content(run, BEGAN)["reason"]


def test_another_end_is_said_as_the_supervisor_said_it(tmp_path):
    run = make_run(tmp_path / "tiny-20260101-000000", language="zh")
    (run / "status.json").write_text(status_text(Status(run.name, "failed", reason="{x}", cause=Cause("hung"))))
    assert content(run, BEGAN)["reason"] == "{x}"


def test_every_text_of_the_page_has_its_chinese(tmp_path, monkeypatch):
    """Those that a run with everything shows, and those that templates ask for."""
    asked = set()

    class Watched(dict):
        def get(self, text, default=None):
            asked.add(text)
            return super().get(text, default)

    monkeypatch.setattr("training.text.catalogue.ZH", Watched(ZH))
    make_report(with_everything(make_run(tmp_path / "tiny-20260101-000000", language="zh")))
    assert len(asked) > 80
    folder = ROOT / "training" / "node" / "metrics"
    sources = [*folder.glob("*.jinja"), *folder.glob("*.py")]
    said = {text for path in sources for text in re.findall(r'\bsay\("([^"]+)"', path.read_text(encoding="utf-8"))}
    assert len(said) > 40
    drawn = {text for plot in plots({}) for text in (plot.title, plot.unit, *(curve.name for curve in plot.curves))}
    keys = {
        *run_tables.COUNTS.values(),
        *(name for name, *_ in SCORES),
        *get_args(State),
    }
    keys |= {run_tables.LONGEST_PAIR, run_tables.HELD_OUT, run_tables.CHOSEN, run_tables.LOSS}
    keys |= {"best validation loss (DPO)"}
    keys |= {EMPTY_ANSWER, ONE, PART, ALL_OF_ONE, ALL}
    assert sorted((asked | said | drawn | keys) - ZH.keys() - {""}) == []


def test_a_chinese_text_fills_in_what_the_english_one_does():
    names = {text: set(re.findall(r"{(\w+)}", text)) for text in (*ZH, *ZH.values())}
    assert [text for text, chinese in ZH.items() if names[text] != names[chinese]] == []


def test_a_report_of_a_chinese_terminal_is_chinese(tmp_path):
    run = with_everything(make_run(tmp_path / "tiny-20260101-000000", language="zh"))
    text = make_report(run).read_text(encoding="utf-8")
    assert '<html lang="zh">' in text and "计划与实测" in text and "1 小时 30 分" in text
    assert not {"Curves", "Machines", "Held-out answers"} & set(Page(text).texts)


@pytest.mark.parametrize(
    ("environ", "said", "language"),
    [
        ({"LANG": "zh_CN.UTF-8"}, "", "zh"),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": "C"}, "", "en"),
        ({"LC_ALL": "zh_TW"}, "en", "en"),
        ({}, "zh", "zh"),
        ({}, "", "en"),
    ],
)
def test_the_language_is_the_terminals_unless_cluster_toml_says_one(environ, said, language):
    assert language_of(environ, said) == language


@pytest.mark.parametrize(
    ("text", "language"), [('language = "zh"\n', "zh"), (None, "en"), ("language = [\n", "en"), (b"\xff\xfe\xfd", "en")]
)
def test_a_run_on_this_machine_is_told_in_the_language_of_cluster_toml_where_that_can_be_read(
    tmp_path, monkeypatch, text, language
):
    monkeypatch.setenv("SPOTUNE_CLUSTER", str(tmp_path / "cluster.toml"))
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    if text is not None:
        (tmp_path / "cluster.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
    launch = Session(HereHead(tmp_path / "runs")).launch_of("tiny-20260101-000000", "")
    assert launch.language == language


AT_HOME = (
    "metrics.jsonl",
    "starts.jsonl",
    "status.json",
    "launch.json",
    "plan.json",
    "recipe.toml",
    "versions.json",
    EVENTS,
)


def fetched(run: Path, home: Path) -> Path:
    """What a fetch brings, without the checkpoint."""
    for name in (*AT_HOME, "data/report.json", "report-facts.json", "evaluation.json"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(run / name, home / name)
    (home / ".fetched").write_text(f"{run}\n")
    return home


def test_a_fetched_run_has_its_page_made_here_and_it_shows_what_the_heads_did(tmp_path):
    run = with_everything(make_run(tmp_path / "head" / "tiny-20260101-000000"))
    theirs = Page(make_report(run).read_text(encoding="utf-8")).texts
    home = fetched(run, tmp_path / "home" / run.name)
    (home / "report.html").write_text("<script>alert(1)</script>")
    (home / "training").mkdir()
    (home / "training" / "__init__.py").write_text("raise SystemExit('code of the head')")
    ours = Page(make_page(home).read_text(encoding="utf-8")).texts
    assert json.loads((home / "report-facts.json").read_text())["checkpoint"] == 30
    assert sha256_of(run / "data" / "train.jsonl") in ours and "no idea" in ours
    assert len(theirs) - len(ours) < 20  # how the adapter, which is not at home here, is loaded


def test_a_page_made_here_is_in_the_language_of_the_terminal(tmp_path, monkeypatch):
    run = with_everything(make_run(tmp_path / "head" / "tiny-20260101-000000"))
    make_report(run)
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    monkeypatch.setenv("SPOTUNE_CLUSTER", str(tmp_path / "cluster.toml"))
    page = make_page(fetched(run, tmp_path / "home" / run.name))
    assert '<html lang="zh' in page.read_text(encoding="utf-8")


def test_a_page_is_made_again_where_a_file_came_since_or_in_another_language(tmp_path, monkeypatch):
    def mark():
        with (home / "report.html").open("a") as page:
            page.write("<!-- as it was -->")

    def is_kept():
        return make_page(home).read_text(encoding="utf-8").endswith("<!-- as it was -->")

    run = with_everything(make_run(tmp_path / "head" / "tiny-20260101-000000"))
    make_report(run)
    home = fetched(run, tmp_path / "home" / run.name)
    monkeypatch.setenv("SPOTUNE_CLUSTER", str(tmp_path / "cluster.toml"))
    make_page(home)
    mark()
    assert is_kept()
    (home / "metrics.jsonl").touch()
    assert not is_kept()
    mark()
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    assert not is_kept()


def test_facts_of_a_head_are_data_and_what_is_none_makes_no_page(tmp_path, capsys):
    run = with_everything(make_run(tmp_path / "head" / "tiny-20260101-000000"))
    make_report(run)
    home = fetched(run, tmp_path / "home" / run.name)
    facts = json.loads((home / "report-facts.json").read_text())
    write(home / "report-facts.json", {**facts, "files": [[EVIL, "1 B", "1", ""]]})
    assert "<script" not in make_report(home).read_text(encoding="utf-8")
    for odd in ({"checkpoint": "../../../etc"}, {"files": [[1, 2]]}):
        write(home / "report-facts.json", {**facts, **odd})
        assert make_page(home) is None and not (home / "report.html").exists()
    assert capsys.readouterr().out.count("cannot be made of what the head sent") == 2
