from tests.launch.cluster import cluster as cluster
