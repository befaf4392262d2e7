# Sourced by demo.sh and test.sh, which set $root: makes $root/.venv ready and sets $python to its
# interpreter. POSIX sh; nothing but a Python is expected of the machine. pip's own environment
# variables and configuration files are honoured.

say() { printf '%s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

venv="$root/.venv"
python="$venv/bin/python"
lock="$root/.venv.lock"

# set_up EXTRA: install with pip's EXTRA ("dev") or without one (""). Fast where that was done before:
# a stamp holds a checksum of all that decides what gets installed, the place included.
set_up() {
    extra=$1
    wanted=$({ cat "$root/pyproject.toml" "$root/constraints.txt"; printf '%s' "$root"; } | cksum)
    is_ready "$extra" && return
    take_lock
    is_ready "$extra" || install "$extra"
    release_lock
}

# A set-up with the dev extra serves for everything.
is_ready() {
    for stamp in "$venv/ragen-ready-dev" "$venv/ragen-ready-$1"; do
        [ -x "$python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && return 0
    done
    return 1
}

# The stamp is written last, so a set-up that was interrupted is simply done again.
install() {
    rm -f "$venv"/ragen-ready-*
    if ! "$python" -m pip --version >/dev/null 2>&1; then
        base=$(find_python) || exit 1
        say "Making a virtual environment in $venv"
        "$base" -m venv --clear "$venv" >&2 || die "Cannot make $venv; see the message above."
    fi
    say "Installing RAGEN and what it needs (once; torch is large)"
    (cd "$root" && "$python" -m pip install -c constraints.txt -e ".${1:+[$1]}") >&2 ||
        die "The installation failed; pip's message above says why. Run this again to go on."
    printf '%s' "$wanted" >"$venv/ragen-ready-$1"
}

# Prints the first Python that will do; $PYTHON goes first.
find_python() {
    found='' old=''
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.14 python3.13 python3.12 python3.11 python; do
        version=$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
            continue
        if ! "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            old=${old:-$version}
        elif "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return 0
        else
            found=${found:-$version}
        fi
    done
    if [ -n "$found" ]; then
        say "Python $found lacks its venv module. On Debian or Ubuntu: apt install python$found-venv"
    elif [ -n "$old" ]; then
        say "RAGEN needs Python 3.11 or newer; this machine has $old. See https://www.python.org/downloads"
    else
        say "RAGEN needs Python 3.11 or newer; none was found. See https://www.python.org/downloads"
    fi
    return 1
}

# One set-up at a time: mkdir succeeds for one process only. A lock whose process is gone is removed.
take_lock() {
    waited=0 missing=0
    until mkdir "$lock" 2>/dev/null; do
        holder=$(cat "$lock/pid" 2>/dev/null) || holder=''
        if [ ! -d "$lock" ]; then # Just released; or it can never be made.
            missing=$((missing + 1))
            [ "$missing" -lt 9 ] || die "Cannot write in $root: copy RAGEN to a folder of your own."
        elif [ -n "$holder" ] && ! kill -0 "$holder" 2>/dev/null; then
            rm -rf "$lock"
        elif [ -z "$holder" ] && [ "$waited" -ge 5 ]; then
            rm -rf "$lock"
        else
            [ "$waited" -gt 0 ] || say "Waiting for another set-up that is running here ($lock)"
            sleep 1
            waited=$((waited + 1))
        fi
    done
    trap release_lock EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    echo "$$" >"$lock/pid"
}

release_lock() {
    rm -rf "$lock"
    trap - EXIT INT TERM
}
