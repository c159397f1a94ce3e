"""Reading real files of every kind, good and bad; errors name file and line."""

import json
import os
import sysconfig

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from array_record.python import array_record_module

from glm5_jax.data.config import SourceConfig
from glm5_jax.data.report import DataError, DataReport
from glm5_jax.data.sources import identity, list_files, read_documents


def read(kind, path, on_bad='skip', **options):
  report = DataReport(on_bad=on_bad)
  source = SourceConfig(kind=kind, path=str(path), **options)
  return list(read_documents(source, report)), report


def write_array_record(path, records):
  writer = array_record_module.ArrayRecordWriter(str(path), 'group_size:1')
  for record in records:
    writer.write(record)
  writer.close()


def write_jsonl(path, lines):
  path.write_bytes(b''.join(line + b'\n' for line in lines))


def write_parquet(path, column, **kwargs):
  pq.write_table(pa.table({'id': range(len(column)), 'text': column}), path, **kwargs)


def test_text_tree(tmp_path):
  files = {
    'a.py': 'one\r\n', 'sub/b.py': 'zwei ü', 'sub/c.txt': 'no', '.git/d.py': 'no', 'x/e.py': 'no',
  }  # fmt: skip
  for name, text in files.items():
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(text.encode())
  options = {'patterns': ('**/*.py',), 'exclude': ('.*', 'x')}
  documents, report = read('text', tmp_path, **options)
  assert [d.text for d in documents] == ['one\r\n', 'zwei ü']
  assert [d.num_bytes for d in documents] == [5, 7]
  assert str(documents[1].origin) == str(tmp_path / 'sub/b.py')
  assert (report.documents, report.num_bytes, dict(report.counts)) == (2, 12, {})
  by_glob, _ = read('text', tmp_path / '**/*.txt')
  assert [d.text for d in by_glob] == ['no']


def test_split_hash_is_fixed(tmp_path):
  """The split must be the same on every machine and for every Python."""
  for folder in ('one', 'two'):
    (tmp_path / folder / 'json').mkdir(parents=True)
    (tmp_path / folder / 'json/tool.py').write_text(folder)
    documents, _ = read('text', tmp_path / folder)
    assert documents[0].split_hash == 0x0562C2FB
  write_jsonl(tmp_path / 'a.jsonl', [b'{"text": "same"}', b'{"text": "other"}'])
  write_parquet(tmp_path / 'a.parquet', ['same'])
  same, other = read('jsonl', tmp_path / 'a.jsonl')[0]
  assert read('parquet', tmp_path / 'a.parquet')[0][0].split_hash == same.split_hash
  assert other.split_hash != same.split_hash


def test_separator(tmp_path):
  path = tmp_path / 'plays.txt'
  path.write_text('First:\nhello\n\n\n\nSecond:\nhi\n\nThird\n')
  documents, _ = read('text', path, separator='\n\n')
  assert [(d.text, d.origin.line) for d in documents] == [
    ('First:\nhello', 1),
    ('Second:\nhi', 6),
    ('Third\n', 9),
  ]


def test_jsonl(tmp_path):
  path = tmp_path / 'a.jsonl'
  write_jsonl(path, [b'\xef\xbb\xbf{"body": "x"}', b'', b'{"body": "y\\n", "id": 3}'])
  documents, report = read('jsonl', path, field='body')
  assert [(d.text, d.origin.line) for d in documents] == [('x', 1), ('y\n', 3)]
  assert not report.counts


def test_parquet_over_row_groups_and_types(tmp_path):
  texts = [f'text {i}' for i in range(2500)]
  write_parquet(tmp_path / 'a.parquet', texts, row_group_size=700)
  write_parquet(tmp_path / 'b.parquet', pa.array(['p', 'q', 'p']).dictionary_encode())
  write_parquet(tmp_path / 'c.parquet', pa.array([b'r'], pa.large_binary()))
  write_parquet(tmp_path / 'd.parquet', pa.array([], pa.string()))
  documents, report = read('parquet', tmp_path)
  assert [d.text for d in documents] == [*texts, 'p', 'q', 'p', 'r']
  assert documents[1700].origin.line == 1701
  assert not report.counts


def test_array_record_raw_and_json(tmp_path):
  write_array_record(tmp_path / 'a.array_record', [b'one', 'zwei ü'.encode()])
  write_array_record(tmp_path / 'b.array_record', [b'{"text": "three"}'])
  raw, _ = read('array_record', tmp_path / 'a.array_record', field='')
  assert [(d.text, d.origin.line) for d in raw] == [('one', 1), ('zwei ü', 2)]
  structured, _ = read('array_record', tmp_path / 'b.array_record')
  assert [d.text for d in structured] == ['three']


BAD_LINES = {
  b'{"text": "a\xff"}': ('not_utf8', 'byte 0xff at offset 11'),
  b'{"text": "a"': ('broken_json', 'column 13'),
  b'"text"': ('broken_json', 'an object was expected, found str'),
  b'{"a":' * 100_000: ('broken_json', ''),
  b'{"body": "a"}': ('missing_field', "only ['body']"),
  b'{"text": 3}': ('missing_field', 'found int'),
  b'{"text": null}': ('missing_field', 'found NoneType'),
  b'{"text": " \\n"}': ('empty', 'white space'),
  b'{"text": "\\ud800"}': ('not_utf8', 'lone surrogate'),
}


@pytest.mark.parametrize('kind', ['jsonl', 'array_record'])
@pytest.mark.parametrize(('line', 'expected'), BAD_LINES.items(), ids=range(len(BAD_LINES)))
def test_bad_record(tmp_path, kind, line, expected):
  problem, detail = expected
  path = tmp_path / 'a.data'
  write = write_jsonl if kind == 'jsonl' else write_array_record
  write(path, [b'{"text": "good"}', line, b'{"text": "too"}'])
  documents, report = read(kind, path)
  assert [d.text for d in documents] == ['good', 'too']
  assert report.counts == {problem: 1}
  (example,) = report.examples
  assert example.startswith(f'{path}:2: ')
  assert detail in example
  assert '1 ' + problem in str(report)
  with pytest.raises(DataError, match=r'a\.data:2: '):
    read(kind, path, on_bad='fatal')


def bad_file(tmp_path, name):
  """Makes one unusable file; returns its path, kind, the problem and where it is said to be."""
  path = tmp_path / name
  if name == 'latin1.txt':
    path.write_bytes('good line\nsecond\nna\xefve'.encode('latin-1'))
    return path, 'text', 'not_utf8', ':3'
  if name == 'blank.txt':
    path.write_text(' \n\n')
    return path, 'text', 'empty', ''
  if name == 'dangling.txt':
    path.symlink_to(tmp_path / 'nowhere')
    return path, 'text', 'unreadable', ''
  if name == 'pipe.txt':
    os.mkfifo(path)
    return path, 'text', 'unreadable', ''
  if name == 'junk.parquet':
    path.write_bytes(b'junk' * 100)
    return path, 'parquet', 'unreadable', ''
  if name == 'column.parquet':
    pq.write_table(pa.table({'body': ['a']}), path)
    return path, 'parquet', 'missing_field', ''
  if name == 'null.parquet':
    write_parquet(path, ['a', None])
    return path, 'parquet', 'missing_field', ':2'
  if name == 'latin1.parquet':
    write_parquet(path, pa.array([b'a', b'\xff']).view(pa.string()))
    return path, 'parquet', 'not_utf8', ':2'
  if name == 'damaged.parquet':
    write_parquet(path, ['good'] * 10 + [f'bad {i}' for i in range(999)], row_group_size=10,
                  compression='snappy', use_dictionary=False)  # fmt: skip
    data = bytearray(path.read_bytes())
    at = data.index(b'bad 500')
    data[at - 60 : at] = b'\xff' * 60
    path.write_bytes(data)
    return path, 'parquet', 'unreadable', ':511'
  if name == 'truncated.array_record':
    write_array_record(path, [b'{"text": "a"}'] * 3)
    path.write_bytes(path.read_bytes()[:-100])
    return path, 'array_record', 'unreadable', ''
  assert name == 'damaged.array_record'
  write_array_record(path, [b'{"text": "a"}', b'{"text": "b"}', b'{"text": "c"}'])
  path.write_bytes(path.read_bytes().replace(b'"b"', b'"x"'))
  return path, 'array_record', 'unreadable', ':2'


BAD_FILES = [
  'latin1.txt', 'blank.txt', 'dangling.txt', 'pipe.txt', 'junk.parquet', 'column.parquet',
  'null.parquet', 'latin1.parquet', 'damaged.parquet', 'truncated.array_record',
  'damaged.array_record',
]  # fmt: skip


@pytest.mark.parametrize('name', BAD_FILES)
def test_bad_file(tmp_path, name):
  path, kind, problem, place = bad_file(tmp_path, name)
  _, report = read(kind, path)
  assert report.counts == {problem: 1}
  assert report.examples[0].startswith(f'{path}{place}')
  with pytest.raises(DataError, match=name):
    read(kind, path, on_bad='fatal')


def test_documents_around_bad_ones_survive(tmp_path):
  path, kind, _, _ = bad_file(tmp_path, 'damaged.array_record')
  assert [(d.text, d.origin.line) for d in read(kind, path)[0]] == [('a', 1), ('c', 3)]
  path, kind, _, _ = bad_file(tmp_path, 'damaged.parquet')
  documents, _ = read(kind, path)
  lost = {f'bad {i}' for i in range(500, 510)}
  assert {f'bad {i}' for i in range(999)} - {d.text for d in documents} == lost


def test_many_problems_are_all_counted_and_a_few_quoted(tmp_path):
  write_jsonl(tmp_path / 'a.jsonl', [b'{'] * 100 + [b'{"text": ""}'])
  _, report = read('jsonl', tmp_path / 'a.jsonl')
  assert report.counts == {'broken_json': 100, 'empty': 1}
  assert len(report.examples) == 6
  assert DataReport.from_dict(json.loads(json.dumps(report.as_dict()))).counts == report.counts


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'path': '{tmp}/absent'}, 'absent does not exist'),
    ({'path': '{tmp}/*.absent'}, 'does not exist, and no file matches'),
    ({'path': '{tmp}', 'patterns': ('*.rs',)}, r"no file in .* matches \('\*\.rs',\)"),
    ({'path': ''}, 'needs `path`'),
    ({'path': 'a', 'weight': 0}, 'weight'),
    ({'path': 'a', 'kind': 'csv'}, "'csv'; one of .*'parquet'"),
  ],
)
def test_impossible_requests(tmp_path, options, message):
  options = {k: v.format(tmp=tmp_path) if isinstance(v, str) else v for k, v in options.items()}
  with pytest.raises(DataError, match=message):
    list_files(SourceConfig(**{'kind': 'text', **options}))


def test_identity_follows_files_and_options(tmp_path):
  path = tmp_path / 'a.txt'
  path.write_text('one')
  before = identity(SourceConfig(kind='text', path=str(tmp_path)))
  assert identity(SourceConfig(kind='text', path=str(tmp_path), weight=2.0)) == before
  assert identity(SourceConfig(kind='text', path=str(tmp_path), separator='\n')) != before
  path.write_text('four')
  assert identity(SourceConfig(kind='text', path=str(tmp_path))) != before


def test_stdlib_is_read_in_place():
  source = SourceConfig()
  documents, report = [], DataReport()
  documents = list(read_documents(source, report))
  names = {f.relative for f in list_files(source)}
  assert {'os.py', 'json/decoder.py', 'asyncio/events.py'} <= names
  folders = {part for name in names for part in name.split('/')[:-1]}
  assert not folders & {'test', 'tests', 'site-packages', 'idle_test', '__pycache__'}
  assert 400 < len(documents) < 1000
  assert 8 * 2**20 < report.num_bytes < 16 * 2**20
  assert documents[0].origin.path.startswith(sysconfig.get_paths()['stdlib'])
  assert 'PSF-2.0' in source.licence
  held_out = sum(d.split_hash < 0.05 * 2**32 for d in documents)
  assert 0.03 < held_out / len(documents) < 0.07
