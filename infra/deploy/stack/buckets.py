"""The stack's buckets, in Ceph or at the user's own S3 endpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from infra.deploy.stack.credentials import write_private
from infra.deploy.stack.service import StackError
from infra.deploy.stack.site import S3_PROFILE, S3_REGION, Site

if TYPE_CHECKING:
    from botocore.session import Session


def write_keys(site: Site) -> None:
    """The keys of our own S3, in the form of AWS's libraries."""
    keys = {
        "aws_access_key_id": site.credentials.s3_access_key,
        "aws_secret_access_key": site.credentials.s3_secret_key,
    }
    lines = [f"[{S3_PROFILE}]", *(f"{name} = {value}" for name, value in keys.items())]
    write_private(site.s3_credentials, "\n".join(lines) + "\n")


def create_buckets(site: Site) -> None:
    """Have both buckets. StackError where the keys are not accepted."""
    from botocore.exceptions import BotoCoreError, ClientError

    client = _client(site)
    for bucket in (site.settings.bucket, site.settings.mlflow_bucket):
        where = f"S3 at {site.s3_endpoint}, bucket {bucket!r}"
        try:
            if not _exists(client, bucket):
                client.create_bucket(Bucket=bucket)
        except ClientError as error:
            code = error.response["Error"]["Code"]
            raise StackError(f"{where}: {code}: use keys that may read and write it, or create it yourself") from None
        except BotoCoreError as error:
            remedy = "check PPOFLOW_STACK_S3 and the credentials that AWS's libraries find (AWS_PROFILE, for example)"
            raise StackError(f"{where}: {error}: {remedy}") from None


def keys_work(site: Site) -> bool:
    """Whether our S3 takes our keys."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        _client(site).list_buckets()
    except (BotoCoreError, ClientError):
        return False
    return True


def _exists(client: Any, bucket: str) -> bool:
    from botocore.exceptions import ClientError

    try:
        client.head_bucket(Bucket=bucket)
    except ClientError as error:
        if error.response["ResponseMetadata"]["HTTPStatusCode"] != 404:
            raise
        return False
    return True


def _client(site: Site) -> Any:
    """With the user's own credentials for the user's own endpoint, and with our file for ours."""
    import botocore.config
    import botocore.session

    session: Session = botocore.session.Session()
    if not site.settings.s3:
        session = botocore.session.Session(profile=S3_PROFILE)
        session.set_config_variable("credentials_file", str(site.s3_credentials))
        session.set_config_variable("region", S3_REGION)
    config = botocore.config.Config(connect_timeout=5, read_timeout=30, retries={"total_max_attempts": 3})
    return session.create_client("s3", endpoint_url=site.s3_endpoint, config=config)
