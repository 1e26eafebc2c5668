"""Every error of the command line: one or two sentences, what it is about, what to do, nothing half-written.

``docs/errors.md`` is written from the same table: EQUIPOOL_WRITE_DOCS=1 pytest tests/test_cli_errors.py
"""

import ast
import contextlib
import io
import os
import re
import shlex
import shutil
import sys
import warnings
from pathlib import Path

import pytest

from equipool import exceptions
from equipool.cli import main
from error_cases import CASES, make_world, short

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "equipool"
PAGE = ROOT / "docs" / "errors.md"

VERBS = (
    "add choose complete copy correct delete drop fill fit give install keep leave load make mend must name "
    "put rename repair resample run save say use write"
)
REMEDY = rf"(?i)--\w|did you mean|there are \w|end it in|it needs|fetch with|\b({'|'.join(VERBS.split())})\b"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """The folder that every call starts from, with a model of tables and one of images."""
    folder = tmp_path_factory.mktemp("world")
    with contextlib.chdir(folder), cache(folder):
        make_world()
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            assert main("harmonize people.csv --out fitted --no-report".split()) == 0
            assert main("harmonize bids --out brains --steps 2 --no-report".split()) == 0
    shutil.rmtree(folder / "cache")
    return folder


@pytest.fixture(scope="module")
def outcomes(world, tmp_path_factory):
    """What each call ends in: exit code, stderr, and the folder before and after; and where errors arose."""
    found, raised = {}, set()
    with noting(raised):
        for case in CASES:
            folder = tmp_path_factory.mktemp("call") / "here"
            shutil.copytree(world, folder)
            with contextlib.chdir(folder), cache(folder):
                if case.change:
                    case.change()
                before = listing(folder)
                code, said = call(shlex.split(case.call))
                found[case.what] = code, said, before, listing(folder)
    return found, raised


@contextlib.contextmanager
def cache(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EQUIPOOL_CACHE", str(folder / "cache"))
        yield


def call(words):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            code = main(words)
        except SystemExit as stop:
            code = stop.code
    return code, err.getvalue()


def listing(folder):
    files = (path for path in folder.rglob("*") if "cache" not in path.relative_to(folder).parts)
    return {str(path): path.read_bytes() if path.is_file() else None for path in files}


@contextlib.contextmanager
def noting(raised):
    """Note the file and the line of every error of ours that is made."""

    def made(self, *words):
        frame = sys._getframe(1)
        raised.add((frame.f_code.co_filename, frame.f_lineno))
        Exception.__init__(self, *words)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exceptions.EquipoolError, "__init__", made)
        yield


def message_of(said):
    """Return the last thing said, which is the error; before it come guesses and warnings."""
    return "equipool: " + re.split(r"(?m)^equipool: ", said)[-1].strip()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.what)
def test_an_error_is_short_tells_what_and_what_to_do(case, outcomes):
    code, said, before, after = outcomes[0][case.what]
    assert code == case.code, said
    assert "Traceback" not in said
    assert after == before
    if code == 1:
        return  # a verdict, on stdout
    message = message_of(said)
    assert case.words in message
    assert re.search(REMEDY, message), message
    assert len(message) < 420, message
    lines = message.splitlines()
    assert len(lines) == 1 or all(line.startswith("  ") for line in lines[1:]), message
    assert message[-1] in ".?)" or message.endswith("--help") or len(lines) > 1, message


def test_the_page_lists_them(outcomes):
    page = [
        "# Errors of the command line",
        "",
        "What each wrong call or spoilt input ends in, written from the table in `tests/error_cases.py`; in",
        "all of them nothing is left behind. `fitted` and `brains` are results of `equipool harmonize`.",
        "",
    ]
    for case in CASES:
        code, said, *_ = outcomes[0][case.what]
        lines = (
            short(message_of(said)).splitlines()
            if code != 1
            else ["(the report, with its verdict, on stdout)"]
        )
        page += [f"**{case.what}** (exit code {code})", "", "```text", f"$ equipool {case.call}".rstrip()]
        page += [*lines, "```", ""]
    text = "\n".join(page)
    if os.environ.get("EQUIPOOL_WRITE_DOCS"):
        PAGE.write_text(text)
    assert PAGE.read_text() == text, "out of date: EQUIPOOL_WRITE_DOCS=1 pytest tests/test_cli_errors.py"


# Functions with an error that no call above reaches, and why: small, or it hides something.
UNREACHED = {
    "given by Python callers alone: the commands give no such argument, or check it before": """
        commands/apply.py::_apply_to_table commands/apply.py::run
        data/bids.py::require_partners data/brains.py::simulate_brains
        data/images.py::__getitem__ data/images.py::from_array data/images.py::unmask
        data/images.py::with_values data/images.py::write
        data/nifti.py::read_mask data/nifti.py::survey data/nifti.py::write_volume
        data/pooled.py::__getitem__ data/pooled.py::_covariates_for data/pooled.py::_has_target
        data/pooled.py::_known data/pooled.py::_strata data/pooled.py::covariate data/pooled.py::features
        data/pooled.py::folds data/pooled.py::from_arrays data/pooled.py::split
        data/preprocess.py::__post_init__ data/preprocess_folder.py::find_heads
        evaluate/harmonizers.py::read_pool evaluate/metrics.py::delta_eq evaluate/metrics.py::_compared
        evaluate/statmaps.py::_basis evaluate/statmaps.py::_check_length evaluate/statmaps.py::_covariates
        evaluate/statmaps.py::_detection evaluate/statmaps.py::_flags evaluate/statmaps.py::_tiles
        evaluate/statmaps.py::_target evaluate/statmaps.py::detection_at evaluate/statmaps.py::in_volume
        evaluate/statmaps.py::_refuse_collinear evaluate/statmaps.py::of
        evaluate/statmaps.py::significant evaluate/statmaps.py::stat_map
        groups/action.py::_check_shapes groups/action.py::_planes_per_covariate groups/action.py::covariates
        groups/rotations.py::apply groups/rotations.py::compose groups/rotations.py::skew
        groups/tau.py::__init__ groups/tau.py::_choose_planes groups/tau.py::to_sphere
        models/base.py::_checked_volumes models/base.py::_features models/base.py::_output
        models/base.py::_split models/base.py::_weigh_classes models/base.py::predict_proba
        models/encoding.py::apart models/encoding.py::covariate_frame
        models/arguments.py::chosen_rows models/arguments.py::given_sites models/arguments.py::learned_from
        models/arguments.py::persons models/harmonizer.py::_check models/harmonizer.py::check_settings
        models/persistence.py::_with_own_modules models/persistence.py::load models/persistence.py::_save
        nn/checkpoints.py::__post_init__ nn/checkpoints.py::_require_same nn/distributed.py::start
        models/pooler.py::_actions models/pooler.py::_build_stage_one models/pooler.py::_given_covariates
        models/pooler.py::_site_codes models/pooler.py::from_preset models/pooler.py::predictor
        models/pooler.py::transport models/rows.py::check_grid models/rows.py::through
        nn/losses.py::_check_rows nn/networks.py::coder nn/networks.py::require_width
        report/statmaps.py::__init__ report/statmaps.py::glass_figure report/statmaps.py::heights
        report/statmaps.py::statmap_figure report/statmaps.py::write_statmap
        validation/checks.py::find_errors validation/inputs.py::_as_frame
        validation/inputs.py::_refuse_double_names validation/inputs.py::_rename
        validation/inputs.py::_series validation/inputs.py::_target validation/inputs.py::from_arrays
        validation/inputs.py::parse_covariates
    """,
    "a package that is not installed": """
        commands/select.py::run data/preprocess.py::require_extra data/tables.py::_read_parquet
        models/peers.py::fit
    """,
    "a full disk, a file that changes while it is read, a worker that is killed, no network, another run": """
        data/images.py::_fill data/images.py::build data/preprocess_folder.py::_file_hash
        data/uci.py::fetch evaluate/benchmark.py::_must_read
        files.py::write_whole nn/checkpoints.py::_read nn/checkpoints.py::held nn/checkpoints.py::read
        parallel.py::cluster parallel.py::fan_out
    """,
    "a head that cannot be preprocessed: a line of the command's result, which ends with 1": """
        data/preprocess.py::brain_mask data/preprocess.py::preprocess_head data/preprocess.py::read_head
        data/preprocess.py::white_matter_peak
    """,
}


def test_every_other_error_is_accounted_for(outcomes):
    reached = outcomes[1]
    left = set()
    for path in sorted(SOURCE.rglob("*.py")):
        place = path.relative_to(SOURCE).as_posix()
        for function, first, last in raises_of(path):
            if not any(file == str(path) and first <= line <= last for file, line in reached):
                left.add(f"{place}::{function}")
    listed = {name for names in UNREACHED.values() for name in names.split()}
    assert left - listed == set(), (
        "a new error: add a call that ends in it, or say in UNREACHED why none does"
    )
    assert listed - left == set(), "these are reached now: take them out of UNREACHED"


def raises_of(path):
    """Yield the function and the lines of every statement that raises an error of ours."""
    ours = ("InputError", "EquipoolError", "MissingExtraError")
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    for function in functions:
        for node in ast.walk(function):
            made = node.exc if isinstance(node, ast.Raise) else None
            if isinstance(made, ast.Call) and getattr(made.func, "id", "") in ours:
                yield function.name, node.lineno, node.end_lineno
