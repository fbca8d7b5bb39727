//go:build unix

package report

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"
	"unicode"

	"github.com/euryale-ml/euryale/internal/testing/proctest"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// call is an event of a trace, with changed arguments.
func call(seq int, args, text string) string {
	return fmt.Sprintf(`{"name":"allreduce","cat":"collective","ph":"X","ts":%d.000,"dur":5.000,`+
		`"pid":0,"tid":%d,"args":{"call":"allreduce of %s (call %d)","group":"g","rank":0,`+
		`"bytes":8,"count":1,"dtype":"f32","seq":%[2]d%[5]s}}`, 1000*seq, seq, text, seq, args)
}

func traced(calls ...string) string { return `{"traceEvents":[` + strings.Join(calls, ",") + `]}` }

func many(n int, f func(i int) string) (all []string) {
	for i := range n {
		all = append(all, f(i))
	}
	return all
}

// evil has characters that move a cursor, in 7 and 8 bits, turn text round or are not seen.
const evil = "x\u001b[2J\u009b2J\u202e\u2066\u200b"

// TestForeignFilesCostLittle: time, memory and pages do not grow with numbers in files, and what
// is left out is said.
func TestForeignFilesCostLittle(t *testing.T) {
	good := traced(many(300, func(i int) string { return call(i, "", "w") })...)
	link := func(to string) func(string) error {
		return func(path string) error { return os.Symlink(to, path) }
	}
	for name, c := range map[string]struct {
		file string
		text string
		make func(path string) error // instead of the text
		says string                  // in a remark
	}{
		"a rank of 2^62": {"trace.1.json", traced(call(1, `,"rank":4611686018427387904`, "w")),
			nil, "no call has"},
		"a rank below 0": {"trace.1.json", traced(call(1, `,"rank":-1`, "w")), nil,
			"no call has"},
		"bytes of 2^62": {"trace.1.json", traced(call(1, `,"bytes":4611686018427387904`, "w")),
			nil, "no call has"},
		"a large number":   {"trace.99999.json", good, nil, "shows 4096 ranks"},
		"the largest rank": {"trace.4095.json", good, nil, ""},
		"small events": {"trace.1.json", traced(many(1e6, func(int) string {
			return "{}"
		})...), nil, "not those of a rank"},
		"one queue a call": {"trace.1.json", traced(many(60_000, func(i int) string {
			return call(i, "", "w")
		})...), nil, ""},
		"other calls": {"trace.1.json", traced(many(30_000, func(i int) string {
			return call(i, "", fmt.Sprint("w", i))
		})...), nil, ""},
		"deep JSON": {"trace.1.json", strings.Repeat("[", 1e7), nil, ""},
		"deep events": {"trace.1.json", `{"traceEvents":[{"args":` + strings.Repeat("[", 1e7), nil,
			"max depth"},
		"a log of no line": {"attempt_0/rank_1.log", strings.Repeat("x", 2<<20), nil,
			"too long"},
		"a log of a number":     {"attempt_0/rank_99999.log", "x", nil, "shows 4096 ranks"},
		"a log of a longer one": {"attempt_0/rank_4611686018427387904.log", "x", nil, ""},
		"many attempts": {"attempt_0/rank_0.log", "",
			times(mostStarts, "attempt_%d/rank_0.log", "x"), "and 1000 attempts"},
		"many plans":   {"plan.json", "", times(mostPlans, "plan%d.json", plan), "shows 16 plans"},
		"many entries": {"x", "", times(mostEntries, "x%d", ""), "more than 100000 files"},
		"many notes": {"attempt_0/launcher_0.log", strings.Repeat("2026-11-26T20:00:00.000Z x\n",
			1<<20), nil, "more notes"},
		"a long note": {"attempt_0/launcher_0.log", "2026-11-26T20:00:00.000Z x\n" +
			strings.Repeat("y\n", 4<<20), nil, ""},
		"many curves": {"attempt_0/rank_0.log", strings.Join(many(1e5, func(i int) string {
			return fmt.Sprintf("epoch 1: c%d=1", i)
		}), "\n"), nil, "more curves"},
		"wide rows":   {"epochs.csv", "epoch" + strings.Repeat(",", 12<<20), nil, "too long"},
		"short rows":  {"epochs.csv", "epoch\n" + strings.Repeat("1\n", 7<<20), nil, ""},
		"many epochs": {"epochs.jsonl", strings.Repeat("{\"Epoch\":1}\n", 1<<20), nil, ""},
		"no numbers":  {"epochs.csv", "epoch,x\nNaN,1\nInf,NaN\n1e308,-1e308\n1,1e308\n", nil, ""},
		"small steps": {"plan.json", `{"arena_bytes":1,"steps":[` + strings.Repeat("{},", 2<<20) +
			`{}]}`, nil, "steps"},
		"a negative plan": {"plan.json", `{"arena_bytes":-1,"beside":{"x":-9223372036854775808},` +
			`"steps":[{"bytes":-1}]}`, nil, ""},
		"a pipe": {"trace.1.json", "", func(path string) error {
			return syscall.Mkfifo(path, 0o600)
		}, ""},
		"a device":     {"trace.1.json", "", link("/dev/zero"), ""},
		"a link out":   {"attempt_0/rank_1.log", "", link("/etc/passwd"), ""},
		"a loop":       {"loop", "", link("."), ""},
		"a long hole":  {"trace.1.json", "", holes, "not whole"},
		"a log of it":  {"attempt_0/rank_1.log", "", holes, "not whole"},
		"a plan of it": {"plan.json", "", holes, "not whole"},
	} {
		dir := t.TempDir()
		put(t, filepath.Join(dir, "trace.0.json"), good)
		path := filepath.Join(dir, c.file)
		if put(t, path, c.text); c.make != nil {
			require.NoError(t, errors.Join(os.Remove(path), c.make(path)))
		}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		began := time.Now()
		j := read(t, dir)
		page := pageOf(t, j)
		runtime.ReadMemStats(&after)
		took := time.Since(began)
		require.Check(t, took <= time.Minute, "%s: %v", name, took)
		most := uint64(600 << 20)
		if proctest.Race { // which lets pools lose what they are given
			most *= 4
		}
		if all := after.TotalAlloc - before.TotalAlloc; all > most || len(page) > 16<<20 {
			t.Errorf("%s: %d MB of memory, a page of %d bytes", name, all>>20, len(page))
		}
		if told := strings.Join(j.remarks, "\n"); !strings.Contains(told, c.says) {
			t.Errorf("%s: no %q in the remarks %q", name, c.says, told)
		}
		require.Check(t, !strings.Contains(page, "root:"), "%s: the page has what a link leads to",
			name)
	}
}

// TestOtherFilesLeaveTracesTheirBytes: logs come first. A file of lines that are no epochs is not
// read any further than its first.
func TestOtherFilesLeaveTracesTheirBytes(t *testing.T) {
	dir := t.TempDir()
	put(t, filepath.Join(dir, "trace.0.json"), traced(call(1, "", "w")))
	put(t, filepath.Join(dir, "attempt_0", "rank_0.log"), strings.Repeat("x\n", 5000))
	put(t, filepath.Join(dir, "others.jsonl"), strings.Repeat("{\"text\": 1}\n", 1<<16))
	root, err := os.OpenRoot(dir)
	require.NoError(t, err)
	defer root.Close()
	j := &Job{dir: root, attempts: map[int]*attempt{}, bytes: mostBytes - mostTraces - 9000}
	if known, err := j.read("others.jsonl"); known || err != nil {
		t.Errorf("lines of another program: %t, %v", known, err)
	}
	_, err = j.read("attempt_0/rank_0.log")
	j.readTraces(map[string]traceID{"trace.0.json": {}})
	require.Check(t, err != nil && len(j.traces) == 1 && j.bytes <= mostBytes-mostTraces+1000,
		"a log of 10,000 bytes is read where 9,000 are left: %v; %d traces, %d bytes", err,
		len(j.traces), j.bytes)
}

const plan = `{"arena_bytes":1,"beside":{},"steps":[]}`

// times makes n files beside the one of a path, by a pattern of their names.
func times(n int, pattern, text string) func(path string) error {
	return func(path string) error {
		dir, ok := strings.CutSuffix(path, "attempt_0/rank_0.log")
		if !ok {
			dir = filepath.Dir(path)
		}
		for i := range n + 1 {
			name := filepath.Join(dir, fmt.Sprintf(pattern, i))
			wrong := os.MkdirAll(filepath.Dir(name), 0o700)
			if wrong = errors.Join(wrong, os.WriteFile(name, []byte(text), 0o600)); wrong != nil {
				return wrong
			}
		}
		return nil
	}
}

// holes makes a file that claims a length.
func holes(path string) error {
	return errors.Join(os.WriteFile(path, []byte(`{"arena_bytes":1`), 0o600),
		os.Truncate(path, 1<<40))
}

// TestNoTextOfAFileIsInThePageAsItIs: whatever the file.
func TestNoTextOfAFileIsInThePageAsItIs(t *testing.T) {
	text := fmt.Sprintf("%q", evil)
	text = strings.ReplaceAll(text[1:len(text)-1], `\x1b`, `\u001b`)
	dir := filepath.Join(t.TempDir(), "d"+evil)
	put(t, filepath.Join(dir, "trace.0.json"), traced(many(300, func(i int) string {
		return call(i, `,"algorithm":"`+text+`","error":"`+text+`","group":"`+text+`"`, text)
	})...))
	put(t, filepath.Join(dir, "attempt_0", "rank_0.log"), "panic: "+evil+"\nepoch 1: a=2\n")
	put(t, filepath.Join(dir, "attempt_0", "launcher_0.log"), "2026-11-26T20:00\u009b000Z "+evil)
	put(t, filepath.Join(dir, "epochs.csv"), "epoch,"+evil+"\n1,2\n")
	put(t, filepath.Join(dir, evil+".json"), `{"arena_bytes":1,"beside":{"`+text+`":1},"steps":`+
		`[{"does":"`+text+`","bytes":1}]}`)
	put(t, filepath.Join(dir, evil+".1.json"), "{")
	j := read(t, dir)
	page := pageOf(t, j)
	for _, c := range page {
		if c != '\n' && c != '\t' && !unicode.IsPrint(c) {
			t.Fatalf("the page has %q", c)
		}
	}
	n := strings.Count(page, `\u202e`)
	require.Check(t, n >= 8, "the page has the texts %d times:\n%s", n, page)
}
