# Sourced by the other launchers before setup.sh, so that wrong arguments are refused before anything is installed.

usage() {  # [LAUNCHER]: the comment at the top of the launcher
    sed -nE '2,/^[^#]/s/^#( |$)//p' "${1:-$0}"
}

refuse() {  # MESSAGE
    echo "error: $1" >&2
    exit 2
}
