#!/usr/bin/env bash
# Set up if needed and run the tests; arguments go to pytest. GPU tests run where there is a GPU.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec "$PYTHON" -m pytest "$@"
