#!/usr/bin/env bash
# All devices of one machine: RANKS=4 examples/launch/one_node.sh train.py --its-own-arguments
set -euo pipefail
exec "${PYTHON:-python}" -m shardfn.run --nproc-per-node "${RANKS:-gpu}" --max-restarts "${RESTARTS:-3}" "$@"
