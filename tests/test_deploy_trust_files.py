import subprocess

from deploy.trust_files import SSHD_CONFIG, NodeKeys, authorized_keys, client_config, known_hosts, public_key

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIE9WGLmu2rkKq6gVrjYO0wWkZsmDtAbjuydOIp0NhP"
PEERS = [
    NodeKeys("te1", "10.0.0.1", KEY + "c1", KEY + "h1"),
    NodeKeys("te2", "10.0.0.2", KEY + "c2", KEY + "h2"),
]
OPERATOR = "ssh-ed25519 AAAAoperator me@laptop"


def test_each_nodes_key_is_good_from_its_own_private_address_only():
    lines = authorized_keys(f"{OPERATOR}\n", PEERS).splitlines()
    assert lines[0] == OPERATOR
    (te2,) = [line for line in lines if line.endswith("spotune:te2")]
    assert te2.startswith('from="10.0.0.2",no-agent-forwarding,no-port-forwarding,no-X11-forwarding ssh-ed25519 ')


def test_a_node_that_left_loses_access_and_its_host_key():
    both = authorized_keys("", PEERS)
    assert "spotune:te2" not in authorized_keys(both, PEERS[:1])
    assert "te2" not in known_hosts(known_hosts("", PEERS), PEERS[:1])


def test_a_rebuilt_node_replaces_its_host_key_everywhere_in_the_file():
    old = "te2,10.0.0.2 ssh-ed25519 AAAAold\n[other]:2222 ssh-ed25519 AAAAother\n"
    text = known_hosts(old, PEERS)
    assert "AAAAold" not in text
    assert "[other]:2222 ssh-ed25519 AAAAother" in text
    assert text.count("te2,10.0.0.2 ") == 1


def test_writing_twice_changes_nothing():
    once = authorized_keys(f"{OPERATOR}\n", PEERS)
    assert authorized_keys(once, PEERS) == once
    hosts = known_hosts("", PEERS)
    assert known_hosts(hosts, PEERS) == hosts


def test_ssh_itself_reads_the_client_config_as_strict(tmp_path):
    config = tmp_path / "config"
    config.write_text(client_config(["te1", "te2"], ["10.0.0.1", "10.0.0.2"]))
    told = subprocess.run(["ssh", "-G", "-F", config, "te2"], capture_output=True, text=True, check=True).stdout
    assert "stricthostkeychecking true" in told
    assert "batchmode yes" in told
    assert "serveraliveinterval 5" in told
    assert "identityfile /root/.ssh/id_cluster" in told


def test_password_logins_are_off_in_every_form():
    assert {"PasswordAuthentication no", "KbdInteractiveAuthentication no"} <= set(SSHD_CONFIG.splitlines())


def test_a_public_key_loses_its_comment():
    assert public_key("ssh-ed25519 AAAA root@te1 somewhere") == "ssh-ed25519 AAAA"
