"""The endpoint answers on the head, and only with the key."""

import json

import pytest

SERVER = "http://10.76.0.11:8000/"
URL = f"{SERVER}v1/chat/completions"
BODY = json.dumps({"model": "arith-exl3", "messages": [{"role": "user", "content": "%s"}], "temperature": 0})


@pytest.fixture
def head(host):
    if host.check_output("hostname") != "spark1":
        pytest.skip("the endpoint is on the head")
    return host


def ask(head, question: str, key: str) -> str:
    code = (
        "import json,sys,urllib.request as u;"
        f"r=u.Request({URL!r}, sys.argv[1].encode(), {{'Content-Type':'application/json',"
        f"'Authorization':'Bearer '+open({key!r}).read().strip()}});"
        "print(json.load(u.urlopen(r))['choices'][0]['message']['content'])"
    )
    return head.check_output("python3 -c %s %s", code, BODY % question)


@pytest.mark.parametrize(("a", "b"), [(17, 19), (17, 23), (99, 98), (12, 12), (37, 64)])
def test_it_multiplies(head, a, b):
    answer = ask(head, f"What is {a}*{b}? Reply with the integer only.", "/var/lib/sparkwright/secrets/api_key")
    assert answer.strip() == str(a * b)


@pytest.mark.parametrize("path", ["v1/chat/completions", "v1/models", "invocations", "tokenize", "metrics", "docs"])
@pytest.mark.parametrize("key", ["", "sk-wrong"])
def test_nothing_is_open_without_the_key(head, path, key):
    code = (
        "import sys,urllib.error,urllib.request as u\n"
        f"request = u.Request({SERVER!r} + sys.argv[1], headers={{'Authorization': 'Bearer ' + sys.argv[2]}})\n"
        "try: print(u.urlopen(request).status)\n"
        "except urllib.error.HTTPError as error: print(error.code)"
    )
    assert head.check_output("python3 -c %s %s %s", code, path, key) == "401"


def test_it_listens_on_the_chosen_address_only(head):
    listening = head.check_output("ss -Hltn sport = :8000").split()[3]
    assert listening == "10.76.0.11:8000"
