#!/usr/bin/env bash
# On each of several machines, of which some may come later or go away:
#     HEAD=node1:29500 NODES=1:4 RANKS=8 examples/launch/nodes.sh train.py --its-own-arguments
# HEAD is the machine that holds the rendezvous: a run does not outlive it.
set -euo pipefail
exec "${PYTHON:-python}" -m shardfn.run --nnodes "$NODES" --nproc-per-node "${RANKS:-gpu}" \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD" --rdzv-id "${RUN:-run}" --max-restarts "${RESTARTS:-10}" \
    --rdzv-conf "last_call_timeout=${LAST_CALL:-30},keep_alive_interval=2,keep_alive_max_attempt=8" "$@"
