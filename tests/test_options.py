# SPDX-License-Identifier: Apache-2.0
"""Options are checked before anything is compiled; every complaint names what is known."""

import pytest
import torch
from checking import check
from torch._inductor import config as inductor_config
from zoo.users import mish

from coda_inductor import OptionError
from coda_inductor.log import forget_warnings
from coda_inductor.options import Options, parse


@pytest.mark.parametrize("option", [{"fp8": "rowwise"}, {"aot": True}], ids=str)
def test_a_removed_option_says_what_replaces_it(option, caplog):
    assert parse(None, option) == parse(None, None)
    assert f"option {next(iter(option))!r} has no effect any more" in caplog.text


def test_nothing_set_gives_the_documented_defaults(monkeypatch):
    for name in ("DEBUG", "DEBUG_DIR", "DISABLE", "PATTERNS", "STRICT", "TUNE"):
        monkeypatch.delenv(f"CODA_{name}", raising=False)
    assert parse(None, None) == parse("default", {}) == Options()


@pytest.mark.parametrize(("mode", "options", "message"), [
    (None, {"max_autotun": True}, r"did you mean 'max_autotune'"),
    (None, {"verbose": 1}, "unknown option 'verbose'"),
    (None, ["debug"], r"got \['debug'\]"),
    (None, {"max_autotune": "hm"}, "Inductor's option 'max_autotune' takes bool, got"),
    ("fast", None, "unknown mode 'fast'; known"),
    (None, {"strict": 1}, "'strict' takes True or False, got 1"),
    (None, {"gate": "allways"}, r"got 'allways' \(did you mean 'always'\?\)"),
    *((None, {"tune_seconds": wrong}, f"'tune_seconds' takes a positive .*, got {wrong!r}")
      for wrong in (0, True, "x", float("inf"), float("nan"))),
    *((None, {name: 3}, f"'{name}' .*got 3") for name in ("disable", "patterns", "debug_dir")),
])  # fmt: skip
def test_what_is_wrong_is_named(mode, options, message):
    with pytest.raises(OptionError, match=message):
        parse(mode, options)


def test_options_of_inductors_pass_through_and_override_its_modes():
    settings = parse(None, {"max_autotune": True, "triton.cudagraphs": False, "strict": True})
    assert settings.inductor == {"max_autotune": True, "triton.cudagraphs": False}
    assert settings.strict
    mode, given = "max-autotune-no-cudagraphs", {"max_autotune": False}
    assert parse(mode, given).inductor == torch._inductor.list_mode_options()[mode] | given


def test_where_inductor_measures_so_do_we(monkeypatch):
    """The environment has a default."""
    for mode in (None, "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"):
        assert parse(mode, None).measures is ("max" in str(mode))
        assert parse(mode, {"tune": "always"}).measures
        for less in ({"tune": "never"}, {"reference": True}, {"max_autotune": False}):
            assert not parse(mode, less).measures
    with inductor_config.patch(max_autotune=True):
        assert parse(None, None).measures
    assert parse(None, {"tune_seconds": 3}).tune_seconds == 3.0
    for text, tune in (("never", "never"), ("", "auto")):
        monkeypatch.setenv("CODA_TUNE", text)
        assert parse(None, None).tune == tune
        assert parse(None, {"tune": "always"}).tune == "always"
    monkeypatch.setenv("CODA_TUNE", "sometimes")
    with pytest.raises(OptionError, match="CODA_TUNE is one of auto, always, never, got 'somet"):
        parse(None, None)


@pytest.mark.parametrize("text", ["1", "true", "on", "0", ""])
def test_debug_and_strict_from_the_environment(monkeypatch, text, caplog):
    for name in ("CODA_DEBUG", "CODA_STRICT"):
        monkeypatch.setenv(name, text)
    monkeypatch.setenv("CODA_DEBUG_DIR", "elsewhere")
    assert parse(None, None).debug is parse(None, None).strict is (text in ("1", "true", "on"))
    assert parse(None, None).debug_dir == "elsewhere"
    off = {"debug": False, "strict": False, "debug_dir": "here"}
    assert parse(None, off) == Options(debug_dir="here")
    assert not caplog.text
    forget_warnings()
    parse(None, {"debug_dir": "here"})
    assert ("'debug_dir' has no effect" in caplog.text) is (text not in ("1", "true", "on"))


def test_disabled_from_the_environment(monkeypatch, caplog):
    """A name that is unknown there may be another graph's."""
    monkeypatch.setenv("CODA_DISABLE", "norm,swigul")
    assert parse(None, {"disable": "rotary"}).disable == ("rotary", "norm", "swigul")
    check(mish, *torch.rand(2, 3, 4), disable=["gemm:any.module"])
    assert "CODA_DISABLE: there is no 'swigul' (did you mean 'swiglu'?)" in caplog.text
    with pytest.raises(Exception, match="option 'disable': there is no 'rotray'"):
        check(mish, *torch.rand(2, 3, 4), disable=["rotray"])
