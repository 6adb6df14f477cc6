# Sourced by scripts/test, scripts/demo and .ci/run: leaves a good virtual environment in $VENV.
#
# Honours PYTHON (the interpreter to build it with) and SHARDGEN_VENV (another place for it).
# An environment is good when it was installed for this very pyproject.toml and still imports.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${SHARDGEN_VENV:-$ROOT/.venv}"
STAMP="$VENV/.installed-for"

say() { printf '\n==> %s\n' "$*"; }

venv_fingerprint() { printf '%s %s\n' "$(sha256sum <"$ROOT/pyproject.toml" | cut -c1-64)" "$ROOT"; }

venv_is_good() {
    [[ -x "$VENV/bin/python" && -f "$STAMP" ]] &&
        [[ "$(cat "$STAMP")" == "$(venv_fingerprint)" ]] &&
        "$VENV/bin/python" -c 'import click, numpy, pyarrow, pytest, rich, shardgen, tokenizers' 2>/dev/null
}

ensure_venv() {
    if venv_is_good; then
        say "using the environment in $VENV"
        return
    fi
    local python="${PYTHON:-python3}"
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
        echo "error: $python is not Python 3.10 or newer; set PYTHON=/path/to/python" >&2
        return 1
    fi
    say "making a virtual environment in $VENV"
    rm -f "$STAMP"
    "$python" -m venv "$VENV" || {
        echo "error: '$python -m venv' failed; on Debian: apt-get install python3-venv" >&2
        return 1
    }
    say "installing shardgen with its dependencies (torch alone is several GB: a few minutes)"
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --editable "$ROOT[dev]" || return 1
    venv_fingerprint >"$STAMP"
}
