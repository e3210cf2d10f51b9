"""The nodes together, seen from the head."""


def test_pdsh_reaches_every_node_from_the_head_at_once(head, cluster):
    names = [node.name for node in cluster.nodes]
    told = head.check_output(f"pdsh -S -w {','.join(names)} hostname")
    assert sorted(told.splitlines()) == sorted(f"{name}: {name}" for name in names)


def test_every_node_reaches_every_other_without_a_question(open_host, cluster):
    for one in cluster.nodes:
        for other in cluster.nodes:
            assert open_host(one.name).check_output(f"ssh {other.name} hostname") == other.name


def test_a_host_nobody_vouched_for_is_refused(head):
    # the code is printed because testinfra takes a 255 for a lost connection of its own
    strict = "-o ConnectTimeout=5 -o BatchMode=yes -o StrictHostKeyChecking=yes"
    refused = head.run(f"ssh {strict} 127.0.0.1 true; echo $?")
    assert refused.stdout.strip() == "255"
    assert "Host key verification failed" in refused.stderr
