"""`make gpu-bundle`: which wheels, and how large it may be."""

import zipfile

from tests.gpu import bundle

PINS = bundle.pins(bundle.WHEELS.read_text(encoding="utf-8"))


def test_wheels_are_what_the_nodes_get_but_for_torch():
    nodes = bundle.pins((bundle.ROOT / "deploy" / "requirements.in").read_text(encoding="utf-8"))
    both = PINS.keys() & nodes.keys()
    assert both == {"transformers", "deepspeed", "peft", "bitsandbytes", "liger-kernel"}
    assert {name: PINS[name] for name in both} == {name: nodes[name] for name in both}
    assert "torch" not in PINS


def test_wheels_of_another_version_are_fetched_anew_and_old_ones_dropped(tmp_path, monkeypatch):
    fetched = []

    def fetch(folder, name, version):
        fetched.append(name)
        (folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl").touch()

    monkeypatch.setattr(bundle, "fetch", fetch)
    bundle.fill(tmp_path)
    assert fetched == list(PINS)
    version = PINS["peft"]
    (tmp_path / f"peft-{version}-py3-none-any.whl").rename(tmp_path / "peft-0.1-py3-none-any.whl")
    bundle.fill(tmp_path)
    assert fetched[len(PINS) :] == ["peft"]
    assert len(list(tmp_path.iterdir())) == len(PINS)
    assert (tmp_path / f"peft-{version}-py3-none-any.whl").exists()


def test_the_largest_wheel_has_its_libraries_for_one_version_of_cuda(tmp_path):
    path = tmp_path / "bitsandbytes-1-py3-none-any.whl"
    names = ["nn.py", "libbitsandbytes_cuda126.so", "libbitsandbytes_cuda130.so", "libbitsandbytes_cpu.so"]
    with zipfile.ZipFile(path, "w") as whole:
        for name in names:
            whole.writestr(f"bitsandbytes/{name}", name)
    bundle.without_libraries(path)
    with zipfile.ZipFile(path) as smaller:
        assert [name.removeprefix("bitsandbytes/") for name in smaller.namelist()] == [names[0], *names[2:]]


def test_a_bundle_above_the_limit_is_refused_in_one_sentence():
    assert bundle.too_large(6 << 20, 58 << 20) == ""
    sentence = ".gpu/ and the tracked files have 67.1 MB together, more than the 67.1 MB allowed"
    assert bundle.too_large(6 << 20, (58 << 20) + 1) == sentence
