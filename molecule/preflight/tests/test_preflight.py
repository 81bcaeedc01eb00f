"""What preflight vouches for is really there."""


def test_engine_answers(host):
    assert host.run("docker version --format '{{.Server.Version}}'").rc == 0


def test_tools_and_modules_are_there(host):
    assert host.exists("rsync") and host.exists("ssh")
    assert host.run("python3 -c 'import requests, packaging'").rc == 0
