"""A Ray cluster on this machine, for as long as standard input is open.

The arguments are the numbers of RBLN devices of its nodes. The address is the first line printed.
"""

import sys

from ray.cluster_utils import Cluster


def main(devices: list[int]) -> None:
    cluster = Cluster()
    try:
        for number in devices:
            cluster.add_node(
                num_cpus=1,
                resources={"RBLN": number},
                include_dashboard=False,
                object_store_memory=80 << 20,
            )
        sys.stdout.write(f"ADDRESS {cluster.address}\n")
        sys.stdout.flush()
        sys.stdin.read()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main([int(number) for number in sys.argv[1:]])
