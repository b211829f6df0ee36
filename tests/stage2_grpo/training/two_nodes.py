"""A Ray cluster of two nodes on this machine, as somebody else would have started it: `python two_nodes.py FOLDER`.

It keeps FOLDER/status.json: the cluster's address, how many nodes are alive, and all nodes on which placement groups,
which is how VERL asks for its workers, have been created. Ends with its process group.
"""

import json
import os
import sys
import time
from pathlib import Path

NODE = {
    "num_cpus": 8,
    "num_gpus": 1,  # pretended
    "object_store_memory": 150 * 2**20,
    "node_ip_address": "127.0.0.1",
    "include_dashboard": False,
}
SETTINGS = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # stay on the loopback address
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_niceness": "0",
}


def main() -> None:
    folder = Path(sys.argv[1])
    (folder / "ray").mkdir()
    os.environ |= {**SETTINGS, "RAY_TMPDIR": str(folder)}  # read when Ray is imported
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    cluster.add_node(**NODE)
    ray.init(address=cluster.address, log_to_driver=False)
    placed: set[str] = set()
    while True:
        for group in ray.util.placement_group_table().values():
            if group["state"] == "CREATED":
                placed |= set(group["bundles_to_node_id"].values())
        alive = sum(node["Alive"] for node in ray.nodes())
        partial = folder / "status.partial"
        partial.write_text(json.dumps({"address": cluster.address, "alive": alive, "placed": sorted(placed)}))
        partial.replace(folder / "status.json")
        time.sleep(0.5)


if __name__ == "__main__":
    main()
