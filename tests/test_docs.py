"""The documentation matches the code: links resolve, named tests exist, commands are accepted."""

import re
import runpy
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from transformers import Qwen2Config, Qwen2ForCausalLM

from ragen.cli.main import COMMANDS, main
from ragen.config.keys import canonical_key
from ragen.config.reading import presets
from ragen.config.sections import RESPONSES
from ragen.models.names import base_folder

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXTEND = (ROOT / "docs" / "extend.md").read_text("utf-8")
AGENTS = (ROOT / "docs" / "agents.md").read_text("utf-8")
NAMES = [page.name for page in PAGES]
FOR_AGENTS = [ROOT / "AGENTS.md", *sorted((ROOT / ".agents" / "skills").glob("*/SKILL.md"))]


def anchors(page: Path) -> set[str]:
    """The link anchors of a page's headings: lower case, no punctuation, hyphens for spaces."""
    titles = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def commands(page: Path) -> Iterator[list[str]]:
    """The arguments of ``ragen`` in the page's shell examples, without comments."""
    for block in re.findall(r"```sh\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r"&&|&|;", line.partition("#")[0]):
                words = shlex.split(part)
                if words[:1] == ["ragen"]:
                    yield words[1:]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text("utf-8")):
        path, _, anchor = target.partition("#")
        other = (page.parent / path) if path else page
        assert other.exists(), target
        assert not anchor or anchor in anchors(other), target


def test_the_navigation_of_the_site_has_every_page() -> None:
    text = (ROOT / "zensical.toml").read_text("utf-8")
    assert sorted(re.findall(r'= "([\w-]+\.md)"', text)) == sorted(NAMES[1:])


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_tests_named_in_pages_exist(page: Path) -> None:
    for file, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text("utf-8")):
        assert f"def {name}" in (ROOT / file).read_text("utf-8"), f"{file}::{name}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_in_pages_are_accepted(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every key exists, and every training command passes a dry run."""
    for key in re.findall(r"--([a-z_]+\.[a-z_.]+[a-z_])", page.read_text("utf-8")):
        canonical_key(key)
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"into `mine.py`.*?```python\n(.*?)```", EXTEND, re.DOTALL)
    Path("mine.py").write_text(example, "utf-8")
    for name in ("my_agent.py", "tasks.jsonl", "trips.jsonl"):
        language = "python" if name.endswith(".py") else "json"
        example, *_ = re.findall(rf"```{language}\n(.*?)```", AGENTS, re.DOTALL)
        Path(name).write_text(example, "utf-8")
    for example in re.findall(r"```python\n(\"\"\"\w+_agent.py: .*?)```", AGENTS, re.DOTALL):
        Path(example[3:].partition(":")[0]).write_text(example, "utf-8")
    for model in ("bandit", "openai"):  # as `ragen sft` and `ragen base` would make it
        shutil.copytree(base_folder("bandit"), f"models/{model}")
    for name, *rest in commands(page):
        assert name in COMMANDS
        if name == "train":
            assert main([name, *rest, "--dry-run"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("page", FOR_AGENTS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_coding_agents_read_names_existing_files_keys_and_metrics(page: Path) -> None:
    text = page.read_text("utf-8")
    assert len(text.splitlines()) <= 60
    test_links_resolve(page)
    for key in re.findall(r"(?:--|`)([a-z_]+\.[a-z_.]+[a-z_])[` ]", text):
        if not key.endswith((".py", ".md", ".sqlite")):
            canonical_key(key)
    metrics = (ROOT / "docs" / "diagnostics.md").read_text("utf-8")
    for name in re.findall(r"`([a-z_.]+/[\w./]+)`", text):
        paths = [ROOT / name, ROOT / "src" / "ragen" / name]
        assert any(path.exists() for path in paths) or f"`{name}`" in metrics, name


@pytest.mark.parametrize("name", ["environment_cards", "gallery"])
def test_pages_that_a_script_writes_are_new(name: str) -> None:
    """Cards follow from the code, the gallery from the recipes and the numbers of other pages."""
    script = runpy.run_path(str(ROOT / "scripts" / f"{name}.py"))
    page = script["PAGE"].read_text("utf-8")
    assert script["renewed"](page) == page, f"run python scripts/{name}.py"


def test_preset_table_is_complete() -> None:
    page = (ROOT / "docs" / "algorithms.md").read_text("utf-8")
    (header,) = re.findall(r"^\| (\| `starpo.*)$", page, re.MULTILINE)
    assert set(re.findall(r"`([^`]+)`", header)) == set(presets())


def test_detector_table_lists_every_detector_and_response() -> None:
    page = (ROOT / "docs" / "diagnostics.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)` \|.*\| (off|log|stop|rollback) \|$", page, re.MULTILINE)
    assert dict(rows) == RESPONSES


SHAPES = {  # Qwen2.5 models: width, layers, heads, key–value heads, inner width, vocabulary, tied
    "0.5B": (896, 24, 14, 2, 4864, 151936, True),
    "7B": (3584, 28, 28, 4, 18944, 152064, False),
}


@pytest.mark.parametrize("name", SHAPES)
def test_memory_table_follows_from_its_formulas(name: str) -> None:
    width, layers, heads, kv_heads, inner, vocabulary, tied = SHAPES[name]
    with torch.device("meta"):
        model = Qwen2ForCausalLM(
            Qwen2Config(
                hidden_size=width,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                num_key_value_heads=kv_heads,
                intermediate_size=inner,
                vocab_size=vocabulary,
                tie_word_embeddings=tied,
            )
        )
    linear = [m for m in model.model.modules() if isinstance(m, torch.nn.Linear)]
    total, backbone = (sum(p.numel() for p in m.parameters()) for m in (model, model.model))
    adapters = sum(64 * (m.in_features + m.out_features) for m in linear)
    cache = 2 * layers * kv_heads * (width // heads) * 2 * 128 * 3072
    parts = [16 * total, 16 * (total + backbone), 18 * total, 18 * (total + backbone)]
    parts += [2 * total + 16 * adapters, 2 * total + 32 * adapters, cache]
    counts = [f"{number / 1e6:,.0f} M" for number in (total, adapters)]
    row = " | ".join([name, *counts, *(f"{part / 2**30:.1f}" for part in parts)])
    assert f"| {row} |" in (ROOT / "docs" / "models.md").read_text("utf-8")


HINT = re.compile(r"pip install[^\n`]*")


def test_install_hints_name_this_distribution() -> None:
    """The name `ragen` on PyPI belongs to another project; every hint names an existing extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    sources = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    named = 0
    for path in sources:
        text = path.read_text("utf-8")
        assert not re.search(r"\bragen\[", text), f"{path}: the distribution is {project['name']}"
        for hint in HINT.findall(text):
            assert not re.search(r"[ '\"]ragen\b(?!-rl)", hint), f"{path}: {hint}"
            for extra in re.findall(r"ragen-rl\[(\w+)\]", hint):
                assert extra in extras, f"{path}: there is no extra {extra!r}"
                named += 1
    assert named >= 5


def test_the_files_for_clusters_are_valid(capsys: pytest.CaptureFixture[str]) -> None:
    """Bash and YAML parse, and their runs pass a dry run."""
    page = (ROOT / "docs" / "cluster.md").read_text("utf-8")
    (script,) = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    (text,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    job = yaml.safe_load(text)
    shell, option, entrypoint = shlex.split(job["spec"]["entrypoint"])
    assert (job["kind"], shell, option) == ("RayJob", "bash", "-c")
    subprocess.run(["bash", "-n"], input=entrypoint, text=True, check=True)
    for commands in (script, entrypoint):
        (words,) = re.findall(r"ragen (train [^;)]*)", commands)
        arguments = [word for word in shlex.split(words) if "$" not in word and word != "--out"]
        assert main([*arguments, "--dry-run"]) == 0, capsys.readouterr().err
