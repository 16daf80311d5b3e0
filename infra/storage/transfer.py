"""Files to S3 and back: several at a time, large ones in parts, never more than a small block of each in memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from infra.storage.download import BLOCK_BYTES, Incoming, Part
from infra.storage.error_translation import ABSENT, ARRIVED_WRONG, code_of, read_answer, translate_errors
from infra.storage.objects import DownloadRequest, DownloadResult, StoreRefused, StoreUnavailable

# Bodies up to this go out as they are; before a larger one boto3 asks the server for leave, and sends it in blocks.
WHOLE_BYTES = 2**20
# S3 takes at most this many parts of a file.
MOST_PARTS = 10_000
NO_SUCH_UPLOAD = "NoSuchUpload"
INVALID_RANGE = "InvalidRange"


class FileSlice:
    """A part of a file, as boto3 wants the body of a request."""

    def __init__(self, descriptor: int, part: Part) -> None:
        self._descriptor, self._part, self._at = descriptor, part, 0

    def __len__(self) -> int:
        return self._part.size

    def read(self, count: int | None = -1) -> bytes:
        """The next bytes, at most `count` of them; all that are left without one."""
        left = self._part.size - self._at
        wanted = left if count is None or count < 0 else min(count, left)
        block = os.pread(self._descriptor, wanted, self._part.start + self._at)
        self._at += len(block)
        return block

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place, counted from the start, from here or from the end."""
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._part.size}[whence]
        return self._at

    def tell(self) -> int:
        """The place of the next byte."""
        return self._at


class Multipart:
    """An upload in parts: what S3 calls it, and the ETags of the parts that have arrived."""

    def __init__(self, key: str, path: Path, size: int, upload_id: str) -> None:
        self.key, self.path, self.size, self.upload_id = key, path, size, upload_id
        self.etags: dict[int, str] = {}


class Transfer:
    """Moves files to and from one bucket."""

    def __init__(self, client: Any, bucket: str, attempts: int, threads: int, part_bytes: int) -> None:
        self._s3 = client
        self._bucket = bucket
        self._attempts = attempts
        self._threads = threads
        self._part_bytes = part_bytes

    def upload(self, files: Mapping[str, Path]) -> None:
        """See `Objects.upload`."""
        begun: list[Multipart] = []
        jobs: list[Callable[[], None]] = []
        try:
            for key, path in files.items():
                size = path.stat().st_size
                parts = self._parts(size)
                if len(parts) == 1:
                    jobs.append(partial(self._put, key, path, parts[0]))
                    continue
                begun.append(upload := Multipart(key, path, size, self._begin(key)))
                jobs += [partial(self._put_part, upload, part) for part in parts]
            self._run(jobs)
            while begun:
                self._complete(begun[-1])
                begun.pop()
        finally:
            # What cannot be aborted now is left to the collector.
            for upload in begun:
                self._abort_quietly(upload)

    def download(self, wanted: Sequence[DownloadRequest]) -> dict[str, DownloadResult]:
        """See `Objects.download`."""
        # A file is hashed from the front, by one thread: the largest begins, or one would wait for it at the end.
        largest_first = sorted(wanted, key=lambda want: want.size, reverse=True)
        files = [Incoming(want, self._parts(want.size)) for want in largest_first]
        try:
            self._run([partial(self._get, file, part) for file in files for part in file.parts])
        finally:
            for file in files:
                file.close()
        return {file.wanted.key: file.arrived() for file in files}

    def abort(self, key: str, upload_id: str) -> None:
        """Abort an upload in parts; that it is gone already is no error."""
        with translate_errors(self._bucket, "abort the upload of", key):
            try:
                self._s3.abort_multipart_upload(Bucket=self._bucket, Key=key, UploadId=upload_id)
            except ClientError as error:
                if code_of(error) != NO_SUCH_UPLOAD:
                    raise

    def again(self, send: Callable[[], Any]) -> Any:
        """Send; again where the server says that the bytes did not arrive as they were, which boto3 does not repeat."""
        for _ in range(1, self._attempts):
            try:
                return send()
            except ClientError as error:
                if code_of(error) not in ARRIVED_WRONG:
                    raise
        return send()

    def _parts(self, size: int) -> list[Part]:
        step = max(self._part_bytes, -(-size // MOST_PARTS))
        starts = range(0, size, step) or range(1)
        return [Part(number, start, min(step, size - start)) for number, start in enumerate(starts, 1)]

    def _run(self, jobs: Sequence[Callable[[], None]]) -> None:
        """Do the jobs, several at a time; after the first that fails, no other is begun."""
        if len(jobs) <= 1:
            for job in jobs:
                job()
            return
        with ThreadPoolExecutor(min(self._threads, len(jobs)), thread_name_prefix="s3") as pool:
            running = [pool.submit(job) for job in jobs]
            try:
                done, _ = wait(running, return_when=FIRST_EXCEPTION)
            finally:
                for future in running:
                    future.cancel()
        for future in done:
            future.result()

    def _begin(self, key: str) -> str:
        with translate_errors(self._bucket, "write", key):
            return str(self._s3.create_multipart_upload(Bucket=self._bucket, Key=key)["UploadId"])

    def _put(self, key: str, path: Path, part: Part) -> None:
        with translate_errors(self._bucket, "write", key), _body(path, part) as body:
            self.again(lambda: self._s3.put_object(Bucket=self._bucket, Key=key, Body=body()))

    def _put_part(self, upload: Multipart, part: Part) -> None:
        with translate_errors(self._bucket, "write", upload.key), _body(upload.path, part) as body:
            answer = self.again(
                lambda: self._s3.upload_part(
                    Bucket=self._bucket,
                    Key=upload.key,
                    UploadId=upload.upload_id,
                    PartNumber=part.number,
                    Body=body(),
                )
            )
            upload.etags[part.number] = answer["ETag"]

    def _complete(self, upload: Multipart) -> None:
        parts = [{"PartNumber": number, "ETag": upload.etags[number]} for number in sorted(upload.etags)]
        with translate_errors(self._bucket, "complete the upload of", upload.key):
            try:
                self._s3.complete_multipart_upload(
                    Bucket=self._bucket, Key=upload.key, UploadId=upload.upload_id, MultipartUpload={"Parts": parts}
                )
            except (ClientError, BotoCoreError):
                # Where an earlier attempt was done and only its answer lost, the object is there.
                if not self._is_there(upload):
                    raise

    def _is_there(self, upload: Multipart) -> bool:
        try:
            return bool(self._s3.head_object(Bucket=self._bucket, Key=upload.key)["ContentLength"] == upload.size)
        except (ClientError, BotoCoreError):
            return False

    def _abort_quietly(self, upload: Multipart) -> None:
        try:
            self.abort(upload.key, upload.upload_id)
        except (StoreUnavailable, StoreRefused):
            return

    def _get(self, file: Incoming, part: Part) -> None:
        def fill(body: Any) -> None:
            with closing(body):
                file.fill(part, _blocks(body))

        with translate_errors(self._bucket, "read", file.wanted.key):
            read_answer(lambda: self._ask_for(file, part), fill, self._attempts)

    def _ask_for(self, file: Incoming, part: Part) -> Any:
        """The body of an answer with this part; None where the object is not the wanted one."""
        if file.refused:
            return None
        whole = len(file.parts) == 1
        span = {} if whole else {"Range": f"bytes={part.start}-{part.start + part.size - 1}"}
        try:
            answer = self._s3.get_object(Bucket=self._bucket, Key=file.wanted.key, **span)
        except ClientError as error:
            if code_of(error) in ABSENT:
                file.refuse(None)
                return None
            if code_of(error) != INVALID_RANGE:
                raise
            # The object ends before this part begins.
            file.refuse(self._s3.head_object(Bucket=self._bucket, Key=file.wanted.key)["ContentLength"])
            return None
        # "bytes 0-99/1234": the size of the whole object comes last; one without a size is seen to be short or not.
        total = answer.get("ContentLength") if whole else int(answer["ContentRange"].rpartition("/")[2])
        if total not in (None, file.wanted.size):
            file.refuse(total)
            answer["Body"].close()
            return None
        return answer["Body"]


@contextmanager
def _body(path: Path, part: Part) -> Iterator[Callable[[], bytes | FileSlice]]:
    """A function that gives a part of a file as the body of one more request."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        stretch = FileSlice(descriptor, part)
        if part.size > WHOLE_BYTES:
            yield lambda: FileSlice(descriptor, part)
        else:
            content = stretch.read()
            yield lambda: content
    finally:
        os.close(descriptor)


def _blocks(body: Any) -> Iterator[bytes]:
    while block := body.read(BLOCK_BYTES):
        yield block
