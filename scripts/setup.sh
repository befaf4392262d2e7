# Sourced by the scripts of this project: finds a Python. POSIX sh.

die() { printf '%s\n' "$*" >&2; exit 1; }

# Prints the first Python that will do; $PYTHON goes first. Without one, the nearest, which says what
# it lacks (scripts/set_up.py).
find_python() {
    lacking='' old=''
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.14 python3.13 python3.12 python3.11 python; do
        "$candidate" -c '' >/dev/null 2>&1 || continue
        if ! "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            old=${old:-$candidate}
        elif ! "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
            lacking=${lacking:-$candidate}
        else
            printf '%s\n' "$candidate"
            return
        fi
    done
    lacking=${lacking:-$old}
    [ -n "$lacking" ] ||
        die "RAGEN needs Python 3.11 or newer; none was found. See https://www.python.org/downloads"
    printf '%s\n' "$lacking"
}
