"""s3:// through boto3, the extra ``s3``. AWS_ENDPOINT_URL selects another server."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import BinaryIO

from ..errors import InputError
from .failures import TRIES


@functools.cache
def _client_of(process: int):
    """One client per process, since a forked copy of a connection pool must not be used."""
    try:
        import boto3
        from botocore.config import Config
    except ImportError:
        raise InputError("s3:// paths need boto3: pip install 'diff_dalle[s3]'") from None
    config = Config(retries={"max_attempts": TRIES, "mode": "standard"})
    return boto3.client("s3", endpoint_url=os.environ.get("AWS_ENDPOINT_URL"), config=config)


class S3:
    def _client(self):
        return _client_of(os.getpid())

    def _where(self, path: str) -> dict[str, str]:
        bucket, _, key = path.removeprefix("s3://").partition("/")
        return {"Bucket": bucket, "Key": key}

    def exists(self, path: str) -> bool:
        try:
            self.size_and_tag(path)
        except self._client().exceptions.ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] == 404:
                return next(self.list_files(path, True), None) is not None
            raise
        return True

    def list_files(self, folder: str, recursive: bool) -> Iterator[str]:
        where = self._where(folder.rstrip("/") + "/")
        options = {"Prefix": where["Key"].lstrip("/"), **({} if recursive else {"Delimiter": "/"})}
        for page in self._client().get_paginator("list_objects_v2").paginate(Bucket=where["Bucket"], **options):
            yield from (f"s3://{where['Bucket']}/{entry['Key']}" for entry in page.get("Contents", ()))

    def size_and_tag(self, path: str) -> tuple[int, str]:
        head = self._client().head_object(**self._where(path))
        return head["ContentLength"], head["ETag"]

    def open_read(self, path: str) -> BinaryIO:
        return self._client().get_object(**self._where(path))["Body"]

    def read(self, path: str, offset: int, size: int | None) -> bytes:
        if size == 0:
            return b""
        span = f"bytes={offset}-{'' if size is None else offset + size - 1}"
        extra = {} if offset == 0 and size is None else {"Range": span}
        try:
            return self._client().get_object(**self._where(path), **extra)["Body"].read()
        except self._client().exceptions.ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] == 416:
                return b""
            raise

    def put(self, local: str, path: str):
        self._client().upload_file(local, *self._where(path).values())

    def make_dirs(self, folder: str):
        """Nothing: object stores have no folders."""

    def remove(self, path: str):
        self._client().delete_object(**self._where(path))
