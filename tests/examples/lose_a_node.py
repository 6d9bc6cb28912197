"""`examples/ray_train.py` on a cluster of two nodes with room for two workers each, of which one dies.

lose_a_node.py STORAGE    # prints rows of step, loss and number of workers, and the seconds from the death to the next
"""

import json
import sys
import threading
import time
from pathlib import Path

import ray
import ray_train
from ray.cluster_utils import Cluster


def main(storage: str) -> None:
    """Train, and print."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    node, told = cluster.add_node(num_cpus=1), Path(storage) / "vit" / "checkpoint_manager_snapshot.json"
    ray.init(address=cluster.address)

    def rows() -> list[dict[str, float]]:
        try:
            return [each["metrics"] for each in json.loads(told.read_text())["checkpoint_results"]]
        except (FileNotFoundError, json.JSONDecodeError):  # not there yet, or being written
            return []

    def lose() -> None:
        while len(rows()) < 2:
            time.sleep(0.1)
        death, before = time.monotonic(), len(rows())
        cluster.remove_node(node, allow_graceful=False)
        while len(rows()) == before or rows()[-1]["workers"] == 4:
            time.sleep(0.1)
        print(f"PAUSE {time.monotonic() - death}", flush=True)

    threading.Thread(target=lose, daemon=True).start()
    options = ["--steps", "60", "--save-every", "5", "--workers", "2", "4", "--dtype", "float64"]
    ray_train.main([*options, "--storage", storage])
    print(f"ROWS {json.dumps(rows())}", flush=True)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
