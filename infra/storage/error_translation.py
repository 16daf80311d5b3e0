"""What S3's errors mean to us: wait and try again, or set something right first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConfigParseError,
    CredentialRetrievalError,
    HTTPClientError,
    IncompleteReadError,
    InvalidConfigError,
    InvalidRegionError,
    NoCredentialsError,
    NoRegionError,
    PartialCredentialsError,
    ProfileNotFound,
    SSOError,
    TokenRetrievalError,
)
from urllib3.exceptions import HTTPError

from infra.storage.objects import StoreRefused, StoreUnavailable

A = TypeVar("A")
T = TypeVar("T")

NO_SUCH_BUCKET = "NoSuchBucket"
ABSENT = frozenset({"NoSuchKey", "404", "NotFound"})
CREDENTIAL_ERRORS = (
    NoCredentialsError,
    PartialCredentialsError,
    CredentialRetrievalError,
    TokenRetrievalError,
    ProfileNotFound,
    SSOError,
    InvalidConfigError,
    ConfigParseError,
)
# The body of an answer ends, resets or hangs before its end, or TLS finds it changed (boto3 passes that on as it is).
BROKEN_OFF = (HTTPClientError, IncompleteReadError, HTTPError)
BAD_CREDENTIALS = frozenset(
    {
        "AuthorizationHeaderMalformed",
        "ExpiredToken",
        "InvalidAccessKeyId",
        "InvalidToken",
        "RequestExpired",
        "SignatureDoesNotMatch",
        "TokenRefreshRequired",
    }
)
WRONG_CLOCK = "RequestTimeTooSkewed"
NOT_ALLOWED = frozenset({"AccessDenied", "AllAccessDisabled", "403", "Forbidden"})
# What was changed on the way there; sending it again helps.
ARRIVED_WRONG = frozenset({"BadDigest", "XAmzContentSHA256Mismatch", "IncompleteBody", "XAmzContentChecksumMismatch"})
# Answers to a request that is right, which may be another one next time.
PASSING_STATUS = frozenset({404, 408, 409, 412, 429})
PASSING = ARRIVED_WRONG | {"InvalidDigest", "RequestTimeout", "Throttling", "ThrottlingException", "TooManyRequests"}
NOT_IMPLEMENTED = 501


def code_of(error: ClientError) -> str:
    """S3's own name for an error."""
    return str(error.response.get("Error", {}).get("Code", ""))


def status_of(error: ClientError) -> int:
    """The HTTP status of an error."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


@contextmanager
def translate_errors(bucket: str, action: str, key: str) -> Iterator[None]:
    """Turn what boto3 raises inside into StoreRefused or StoreUnavailable, naming bucket, key, action and remedy."""
    try:
        yield
    except ClientError as error:
        raise _of_answer(error, bucket, action, key) from error
    except (BotoCoreError, HTTPError) as error:
        raise _of_silence(error, bucket, action, key) from error


def read_answer(ask: Callable[[], A | None], read: Callable[[A], T], attempts: int) -> T | None:
    """What `read` makes of the answer to a call, None where there is none.

    boto3 repeats a call, but not the reading of a body that breaks off: this asks anew then, `attempts` times in all.
    """
    answer = ask()
    try:
        return None if answer is None else read(answer)
    except BROKEN_OFF:
        if attempts == 1:
            raise
    return read_answer(ask, read, attempts - 1)


def _place(bucket: str, key: str) -> str:
    return f"{key!r} in bucket {bucket!r}" if key else f"bucket {bucket!r}"


def _of_answer(error: ClientError, bucket: str, action: str, key: str) -> Exception:
    code = code_of(error)
    answer = f"{code}: {error.response.get('Error', {}).get('Message', '')}".rstrip(": ")
    if code == NO_SUCH_BUCKET:
        return StoreRefused(
            f"S3 has no bucket {bucket!r}: create it, or set PPOFLOW_STORE to one that exists "
            "(AWS_ENDPOINT_URL says at which server)"
        )
    if code in BAD_CREDENTIALS:
        return StoreRefused(
            f"S3 does not accept the credentials for bucket {bucket!r} ({answer}): give boto3 valid ones "
            "(AWS_PROFILE, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, an instance's role)"
        )
    if code in NOT_ALLOWED:
        return StoreRefused(
            f"S3 does not let these credentials {action} {_place(bucket, key)} ({answer}): "
            "allow them to list, read, write and delete objects there"
        )
    if code == WRONG_CLOCK:
        return StoreRefused(f"S3 finds this machine's clock wrong ({answer}): set it, best by NTP")
    if _is_final(error):
        return StoreRefused(
            f"S3 refuses to {action} {_place(bucket, key)} ({answer}): "
            "set right what it names (PPOFLOW_STORE, AWS_ENDPOINT_URL, the bucket's settings or quota)"
        )
    return StoreUnavailable(
        f"S3 could not {action} {_place(bucket, key)} ({answer}, after "
        f"{error.response.get('ResponseMetadata', {}).get('RetryAttempts', 0)} retries): "
        "nothing is lost; try again when the server answers"
    )


def _is_final(error: ClientError) -> bool:
    """Whether S3 itself, and not something on the way to it, would answer the same again."""
    status, code = status_of(error), code_of(error)
    refused = 400 <= status < 500 and status not in PASSING_STATUS and code not in PASSING
    return code.isalpha() and (refused or status == NOT_IMPLEMENTED)


def _of_silence(error: BotoCoreError | HTTPError, bucket: str, action: str, key: str) -> Exception:
    if isinstance(error, CREDENTIAL_ERRORS):
        return StoreRefused(
            f"there are no usable credentials for bucket {bucket!r} ({error}): give boto3 some (AWS_PROFILE, "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, an instance's role; `aws sso login` where they come by SSO)"
        )
    if isinstance(error, (NoRegionError, InvalidRegionError)):
        return StoreRefused(f"bucket {bucket!r} needs a region ({error}): set AWS_DEFAULT_REGION")
    return StoreUnavailable(
        f"S3 could not {action} {_place(bucket, key)} ({error}): nothing is lost; try again when the server answers"
    )
