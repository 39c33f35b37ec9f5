#!/usr/bin/env bash
# Sets up if needed and runs the tests; arguments go to pytest. GPU tests run if there is a GPU.
#
#   bash launch/test.sh -m "not slow"           without the slow ones: kills, stalls, interpreted kernels
#   bash launch/test.sh -m gpu                  only those that need a GPU
#   bash launch/test.sh tests/training -x       one folder, up to the first failure
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec "$PYTHON" -m pytest "$@"
