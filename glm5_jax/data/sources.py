"""Documents from text trees, JSONL, Parquet, ArrayRecord and the Python standard library.

Reading never fails deep inside: what is wrong with a document goes to a `DataReport` with its file
and line, and the next document follows.
"""

import codecs
import dataclasses
import fnmatch
import glob
import hashlib
import json
import os
import pathlib
import stat
import sysconfig
from collections.abc import Callable, Container, Iterator

import grain

from glm5_jax.data import chat, conversations
from glm5_jax.data.config import SourceConfig
from glm5_jax.data.report import DataError, DataReport, Origin

# Of several words tried, the one whose 5 % of the standard library compresses like the whole of it
# (gzip -9, file by file: 2.04 and 2.03 bits per byte): with some 30 files, luck matters.
_SPLIT_SALT = b'validation'


@dataclasses.dataclass(frozen=True)
class Document:
  """One text.

  Attributes:
    text: Its characters; line ends are as in the file.
    origin: File and line.
    num_bytes: Length in UTF-8; of a conversation, of the text that is learnt.
    split_hash: In [0, 2**32), uniform and the same on every machine. Of the file's path relative to
      its folder where whole files are documents, else of the text, so that copies of a record fall
      on the same side of a split.
  """

  text: str
  origin: Origin
  num_bytes: int
  split_hash: int


@dataclasses.dataclass(frozen=True)
class SourceFile:
  """A file of a source; `relative` is its path within the folder that was asked for."""

  path: pathlib.Path
  relative: str


def list_files(source: SourceConfig, report: DataReport | None = None) -> list[SourceFile]:
  """The files of a source, in an order that does not depend on the file system.

  Folders that cannot be listed go to the report, if there is one.

  Raises:
    DataError: A path does not exist, or nothing in it matches.
  """
  roots = (sysconfig.get_paths()['stdlib'],) if source.kind == 'stdlib' else source.paths
  found: dict[str, SourceFile] = {}
  for root in roots:
    for entry in _expand(root):
      if entry.is_dir():
        files = _walk(entry, source, report)
      else:
        files = [SourceFile(entry, entry.name)]
      found.update((str(f.path), f) for f in files)
  if source.kind == 'stdlib':
    # Empty __init__.py files are no defect there, nor links that a distribution left dangling.
    found = {key: f for key, f in found.items() if f.path.is_file() and f.path.stat().st_size}
  if not found:
    raise DataError(
      f'source {source.name!r}: no file in {", ".join(roots)} matches {source.patterns} '
      f'without {source.exclude}; check `path`, `patterns` and `exclude`'
    )
  return sorted(found.values(), key=lambda f: (f.relative, str(f.path)))


def read_documents(
  source: SourceConfig, report: DataReport, only: Container[str] | None = None
) -> Iterator[Document]:
  """Yields the documents of a source one by one, in a fixed order.

  Args:
    source: What to read.
    report: Counts documents, bytes and problems; raises `DataError` itself if told to.
    only: If given, paths of the files to read; others are passed over.

  Raises:
    DataError: As `list_files`, or a package that the format needs is absent.
  """
  read = _READERS[source.kind]
  for file in list_files(source, report):
    if (only is None or str(file.path) in only) and _is_regular(file.path, report):
      for document in read(file, source, report):
        report.documents += 1
        report.num_bytes += document.num_bytes
        yield document


def identity(source: SourceConfig) -> str:
  """Hash of what `read_documents` will read: the reading options, and each file's path, size, time.

  Used as a cache key, so it does not open the files.
  """
  options: tuple[str, ...] = (source.kind, source.field, source.separator)
  if source.kind == 'chat':
    options += (source.chat_format, str(source.clear_thinking))
  digest = hashlib.sha256('\0'.join(options).encode())
  for file in list_files(source):
    try:
      status = file.path.stat()
      state = f'{status.st_size}\0{status.st_mtime_ns}'
    except OSError as error:  # Reported when it is read.
      state = type(error).__name__
    digest.update(f'\0{file.path}\0{file.relative}\0{state}'.encode('utf-8', 'surrogateescape'))
  return digest.hexdigest()


def _expand(root: str) -> list[pathlib.Path]:
  path = pathlib.Path(root).expanduser()
  if path.exists() or path.is_symlink():
    return [path.absolute()]
  matches = [pathlib.Path(p).absolute() for p in glob.glob(str(path), recursive=True)]
  if not matches:
    raise DataError(f'{path} does not exist, and no file matches it as a pattern')
  return sorted(p for p in matches if not p.is_dir()) or sorted(matches)


def _is_regular(path: pathlib.Path, report: DataReport) -> bool:
  try:
    if stat.S_ISREG(path.stat().st_mode):
      return True
    detail = 'not a regular file'  # Opening a pipe would wait for ever.
  except OSError as error:
    detail = error.strerror or str(error)
  report.bad('unreadable', Origin(str(path)), detail)
  return False


def _walk(root: pathlib.Path, source: SourceConfig, report: DataReport | None) -> list[SourceFile]:
  def unlisted(error: OSError) -> None:
    if report is not None:
      report.bad('unreadable', Origin(str(error.filename)), error.strerror or str(error))

  def excluded(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in source.exclude)

  files = []
  for folder, folders, names in os.walk(root, onerror=unlisted):
    folders[:] = [name for name in folders if not excluded(name)]
    for name in names:
      path = pathlib.Path(folder, name)
      relative = path.relative_to(root).as_posix()
      # A leading '**/' also stands for no folder at all, as in a shell.
      matches = any(
        fnmatch.fnmatchcase(relative, p) or fnmatch.fnmatchcase(relative, p.removeprefix('**/'))
        for p in source.patterns
      )
      if matches and not excluded(name):
        files.append(SourceFile(path, relative))
  return files


def _document(
  text: object, origin: Origin, report: DataReport, key: str | None = None
) -> Document | None:
  """Checks a text (str, or UTF-8 bytes) and wraps it; None if it had to be left out."""
  try:
    if isinstance(text, str):
      data = text.encode()
    else:
      assert isinstance(text, bytes)
      data, text = text, text.decode()
  except UnicodeDecodeError as error:
    line = error.object.count(b'\n', 0, error.start)
    if not origin.line:
      origin = Origin(origin.path, line + 1)
    byte = error.object[error.start]
    report.bad('not_utf8', origin, f'byte 0x{byte:02x} at offset {error.start} ({error.reason})')
    return None
  except UnicodeEncodeError as error:
    report.bad('not_utf8', origin, f'a lone surrogate at character {error.start}')
    return None
  if not text.strip():
    report.bad('empty', origin, 'no text, or only white space')
    return None
  seed = data if key is None else key.encode('utf-8', 'surrogateescape')
  digest = hashlib.blake2b(_SPLIT_SALT + seed, digest_size=4).digest()
  split_hash = int.from_bytes(digest, 'big')
  return Document(text, origin, len(data), split_hash)


def _read_text(file: SourceFile, source: SourceConfig, report: DataReport) -> Iterator[Document]:
  origin = Origin(str(file.path))
  try:
    data = file.path.read_bytes()
  except OSError as error:
    report.bad('unreadable', origin, error.strerror or str(error))
    return
  if not source.separator:
    document = _document(data, origin, report, key=file.relative)
    if document:
      yield document
    return
  line = 1
  separator = source.separator.encode()
  for part in data.split(separator):
    # Runs of separators are one border, not empty documents.
    if part.strip():
      document = _document(part, Origin(origin.path, line), report)
      if document:
        yield document
    line += (part + separator).count(b'\n')


def _read_jsonl(file: SourceFile, source: SourceConfig, report: DataReport) -> Iterator[Document]:
  number = 0
  try:
    with file.path.open('rb') as lines:
      for number, line in enumerate(lines, 1):
        if number == 1:
          line = line.removeprefix(codecs.BOM_UTF8)
        if not line.strip():
          continue
        document = _json_document(line, Origin(str(file.path), number), source.field, report)
        if document:
          yield document
  except OSError as error:
    report.bad('unreadable', Origin(str(file.path), number), error.strerror or str(error))


def _read_chat(file: SourceFile, source: SourceConfig, report: DataReport) -> Iterator[Document]:
  for document in _read_jsonl(file, dataclasses.replace(source, field=''), report):
    try:
      parts = conversations.samples(document.text, source)
    except chat.ChatError as error:
      report.bad('bad_chat', document.origin, str(error))
    else:
      # A model is measured by what it has to write.
      yield dataclasses.replace(document, num_bytes=sum(part.num_bytes for part in parts))


def _json_document(line: bytes, origin: Origin, field: str, report: DataReport) -> Document | None:
  try:
    record = json.loads(line.rstrip().decode())
  except UnicodeDecodeError as error:
    byte = line[error.start]
    report.bad('not_utf8', origin, f'byte 0x{byte:02x} at offset {error.start} of the line')
    return None
  except json.JSONDecodeError as error:
    report.bad('broken_json', origin, f'{error.msg} at column {error.colno}')
    return None
  except RecursionError:
    report.bad('broken_json', origin, 'nested too deeply')
    return None
  if not isinstance(record, dict):
    report.bad('broken_json', origin, f'an object was expected, found {type(record).__name__}')
    return None
  if not field:  # The record itself is meant.
    return _document(line.rstrip(), origin, report)
  if not isinstance(record.get(field), str):
    found = type(record[field]).__name__ if field in record else f'only {sorted(record)}'
    report.bad('missing_field', origin, f'a string {field!r} was expected, found {found}')
    return None
  return _document(record[field], origin, report)


def _read_parquet(file: SourceFile, source: SourceConfig, report: DataReport) -> Iterator[Document]:
  # grain.experimental.ParquetIterDataset reads every column of a row group at once, drops the row
  # numbers, and fails on the first bad value; hence pyarrow itself.
  try:
    import pyarrow as pa  # Here: slow to import, and few runs read Parquet.
    import pyarrow.parquet as pq
  except ImportError as error:
    raise DataError(f'{file.path}: reading Parquet needs pyarrow: pip install pyarrow') from error
  path = str(file.path)
  try:
    with pq.ParquetFile(path) as table:
      columns = table.schema_arrow.names
      if source.field not in columns:
        detail = f'no column {source.field!r}; columns are {columns}'
        report.bad('missing_field', Origin(path), detail)
        return
      first = 1
      for group in range(table.num_row_groups):
        row = first
        first += table.metadata.row_group(group).num_rows
        try:
          for batch in table.iter_batches(1024, row_groups=[group], columns=[source.field]):
            for scalar in batch.column(0):
              document = _parquet_document(scalar, Origin(path, row), source.field, report)
              row += 1
              if document:
                yield document
        except (OSError, pa.ArrowException) as error:
          detail = f'{_first_line(error)} (rows up to {first - 1} are lost)'
          report.bad('unreadable', Origin(path, row), detail)
  except (OSError, pa.ArrowException) as error:
    report.bad('unreadable', Origin(path), _first_line(error))


def _parquet_document(
  scalar: object, origin: Origin, field: str, report: DataReport
) -> Document | None:
  try:
    value = scalar.as_py()  # type: ignore[attr-defined]
  except UnicodeDecodeError as error:
    value = error.object  # Bytes that claim to be a string: `_document` reports them.
  if not isinstance(value, str | bytes):
    found = 'null' if value is None else type(value).__name__
    report.bad('missing_field', origin, f'a string {field!r} was expected, found {found}')
    return None
  return _document(value, origin, report)


def _read_array_record(
  file: SourceFile, source: SourceConfig, report: DataReport
) -> Iterator[Document]:
  try:
    records = grain.sources.ArrayRecordDataSource(str(file.path))
    count = len(records)
  except (OSError, RuntimeError, ValueError) as error:
    report.bad('unreadable', Origin(str(file.path)), _first_line(error))
    return
  for index in range(count):
    origin = Origin(str(file.path), index + 1)
    try:
      record = records[index]
    except (OSError, RuntimeError, ValueError) as error:
      report.bad('unreadable', origin, _first_line(error))
      continue
    if source.field:
      document = _json_document(record, origin, source.field, report)
    else:
      document = _document(record, origin, report)
    if document:
      yield document


def _first_line(error: Exception) -> str:
  # ArrayRecord reports a truncated file with no words at all.
  return str(error).partition('\n')[0] or 'truncated or damaged'


_Reader = Callable[[SourceFile, SourceConfig, DataReport], Iterator[Document]]
_READERS: dict[str, _Reader] = {
  'stdlib': _read_text,
  'text': _read_text,
  'jsonl': _read_jsonl,
  'parquet': _read_parquet,
  'array_record': _read_array_record,
  'chat': _read_chat,
}
