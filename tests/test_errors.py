import pickle
import signal

import pytest

from diff_dalle.config import InputError, redact

SECRET = "tOpS3cret"

HIDDEN = {
    f"https://host/a.tar?X-Amz-Date=1&X-Amz-Signature={SECRET}": "https://host/a.tar?***",
    f"https://host/a.tar?{SECRET} does not exist": "https://host/a.tar?*** does not exist",
    f"no 'http://host/a?b={SECRET}': denied": "no 'http://host/a?***': denied",
    f"https://host/a?b={SECRET}: denied": "https://host/a?***: denied",
    f"Max retries exceeded with url: /a.tar?sig={SECRET} (refused)": None,
    f"https://user:{SECRET}@host/a": "https://***@host/a",
    f"https://user:a@{SECRET}@host/a?b={SECRET}": "https://***@host/a?***",
    f"ftp://{SECRET}@host/a": "ftp://***@host/a",
    f"pipe:curl -s -H 'Authorization: Bearer {SECRET}' https://host/a": "pipe:curl -s -H *** https://host/a",
    f'pipe:curl -sSH "X-Api-Key: {SECRET}" https://host/a': "pipe:curl -sSH *** https://host/a",
    f"pipe:curl -HX-Any:{SECRET} https://host/a": "pipe:curl -H*** https://host/a",
    f"pipe:curl --header 'Cookie: {SECRET}; b={SECRET}' x": "pipe:curl --header *** x",
    f"pipe:wget --header=X-Any:{SECRET} x": "pipe:wget --header=*** x",
    f"pipe:curl -u user:{SECRET} x": "pipe:curl -u *** x",
    f"pipe:curl -su'user:{SECRET}' x": "pipe:curl -su*** x",
    f'pipe:curl --user "user:a b{SECRET}" x': "pipe:curl --user *** x",
    f"pipe:curl --proxy-user user:{SECRET} x": "pipe:curl --proxy-user *** x",
    f"pipe:wget --http-password={SECRET} x": "pipe:wget --http-password=*** x",
    f"pipe:az --account-key {SECRET} x": "pipe:az --account-key *** x",
    f"pipe:az --sas-token '{SECRET} b' x": "pipe:az --sas-token *** x",
    f"pipe:AWS_SECRET_ACCESS_KEY={SECRET} AWS_SESSION_TOKEN='a {SECRET}' aws s3 cp s3://b/a -": (
        "pipe:AWS_SECRET_ACCESS_KEY=*** AWS_SESSION_TOKEN=*** aws s3 cp s3://b/a -"
    ),
    f"pipe:export HF_TOKEN={SECRET}; get": "pipe:export HF_TOKEN=***; get",
    f"AccountKey={SECRET}&x": "AccountKey=***&x",
    f"Authorization: Basic {SECRET} (sent)": "Authorization: Basic *** (sent)",
    f"x-amz-security-token: {SECRET}": "x-amz-security-token: ***",
    f"{{'api_key': '{SECRET}'}}": "{'api_key': ***}",
    f"the header Bearer {SECRET} was refused": "the header Bearer *** was refused",
    f"""'pipe:curl -H \\'Authorization: Bearer "{SECRET}"\\''""": None,
    f"'pipe:curl -H \"Authorization: Bearer {SECRET}…": "'pipe:curl -H ***",  # a quote that was cut
}


@pytest.mark.parametrize("text", HIDDEN)
def test_secrets_are_hidden_and_hidden_once(text):
    once = redact(text)
    assert SECRET not in once and HIDDEN[text] in (None, once)
    assert redact(once) == once


@pytest.mark.parametrize(
    "text",
    [
        "data/shard-??.tar matches no file",
        "s3://bucket/shard-0?.tar holds no captions",
        "https://host/a/b.tar does not exist",
        "pipe:cat {a,b}.tar | gunzip -c",
        "a sign: the secret of the garden, no token = no entry",
        "Who wrote it? A bearer of secrets, said Bearer and Token.",
        "--tokenizer=clip --max_tokens=77 --num_tokens 8",
        "low-key: a portrait",
        "a-u b@c.org, 5:30; x -> y",
        "pipe:sort -u a.txt",
    ],
)
def test_other_text_is_left_alone(text):
    assert redact(text) == text


def test_an_input_error_redacts_its_message_even_in_another_process():
    error = pickle.loads(pickle.dumps(InputError(f"https://host/a?b={SECRET} does not exist")))
    assert str(error) == "https://host/a?*** does not exist"


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a timer of computing time")
@pytest.mark.parametrize("part", ["x", "-x", "a.", "-u", "--a-", "_secret", "--user ", " ", "http://", "token='"])
def test_a_long_text_takes_time_in_proportion_to_its_length(part):
    """A fraction of a second here, minutes with a rule that looks back or ahead without a bound."""

    def stop(*_):
        raise AssertionError("no end within 10 s of computing")

    previous = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, 10)
    try:
        redact(part * (10_000 // len(part)))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)
