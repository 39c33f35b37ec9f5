# Sourced by the other launchers before setup.sh, so that wrong arguments are refused before anything is installed.

usage() {  # the comment at the top of the launcher
    sed -nE '2,/^[^#]/s/^#( |$)//p' "$0"
}

refuse() {  # MESSAGE
    echo "error: $1" >&2
    exit 2
}
