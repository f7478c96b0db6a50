"""Command lines: what is not recognized is answered with the option that is meant."""

import pytest

from dsframe.arguments import Parser


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--bset"], "; did you mean --best?"),
        (["--confg=a.json"], "; did you mean --config?"),
        (["a.json"], "; did you mean --config a.json?"),
        (["--wibble"], ""),
        (["word"], ""),
    ],
)
def test_the_option_that_is_meant(arguments, hint, capsys):
    parser = Parser(prog="p")
    parser.add_argument("--config")
    parser.add_argument("--best", action="store_true")
    assert parser.parse_args(["--best", "--config", "b"]).config == "b"
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(arguments)
    assert capsys.readouterr().err.splitlines()[-1] == f"p: error: unrecognized arguments: {' '.join(arguments)}{hint}"
