package report

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/observe"
)

// read reads a job that must be readable.
func read(t *testing.T, dir string) *Job {
	t.Helper()
	return require.Value(Read(dir))(t)
}

// pageOf returns the page of a job.
func pageOf(t *testing.T, j *Job) string {
	t.Helper()
	var text bytes.Buffer
	require.NoError(t, j.WriteHTML(&text))
	return text.String()
}

// figures returns the numbers that a page has, for its script.
func figures(t *testing.T, text string) (p page) {
	t.Helper()
	_, rest, _ := strings.Cut(text, `id="data">`)
	data, _, found := strings.Cut(rest, "</script>")
	err := json.Unmarshal([]byte(data), &p)
	require.That(t, err == nil && found, "%v in %.200q", err, data)
	return p
}

// lines returns the points of each curve of a page.
func (p page) lines() map[string][][2]float64 {
	all := map[string][][2]float64{}
	for _, c := range p.Charts {
		for _, line := range c.Lines {
			all[c.X+" "+line.Name] = line.Points
		}
	}
	return all
}

// A layer is slow that takes longer than it did, or than on the other ranks.
func TestSlowLayersAreNamed(t *testing.T) {
	for name, test := range map[string]struct {
		slow func(rank, step int) bool
		want []layerLine
	}{
		"none": {func(rank, step int) bool { return step == 3 }, []layerLine{
			{"h.1", 0, 0.4, 0.4, 0.4, false}, {"h.1", 1, 0.4, 0.4, 0.4, false},
			{"h.1", 2, 0.4, 0.4, 0.4, false}}},
		"one rank in the end": {func(rank, step int) bool { return rank == 1 && step > 90 },
			[]layerLine{{"h.1", 1, 1, 0.4, 0.4, true}, {"h.1", 0, 0.4, 0.4, 1, false},
				{"h.1", 2, 0.4, 0.4, 1, false}}},
		"one rank always": {func(rank, step int) bool { return rank == 2 }, []layerLine{
			{"h.1", 2, 1, 1, 0.4, true}, {"h.1", 0, 0.4, 0.4, 1, false},
			{"h.1", 1, 0.4, 0.4, 1, false}}},
		"all in the end": {func(rank, step int) bool { return step > 90 }, []layerLine{
			{"h.1", 0, 1, 0.4, 1, true}, {"h.1", 1, 1, 0.4, 1, true}, {"h.1", 2, 1, 0.4, 1, true}}},
	} {
		dir := t.TempDir()
		truth{ranks: 3, steps: 100, buckets: 2,
			ahead:   func(int, int64) int64 { return 0 },
			delayed: func(int, int) int64 { return 0 },
			layer: func(rank, step int) int64 {
				return map[bool]int64{false: 400_000, true: 1_000_000}[test.slow(rank, step)]
			}}.write(t, dir)
		text := pageOf(t, read(t, dir))
		require.Slices(t, name, figures(t, text).Layers, test.want)
		require.Equal(t, name+": named", strings.Contains(text, "<p>Slow: layer <b>h.1</b>"),
			test.want[0].Slow)
	}
}

// Ranks of another generation have other shares of the work: no layer is slow beside theirs.
func TestLayersAreComparedWithinAGeneration(t *testing.T) {
	dir := t.TempDir()
	var want []layerLine
	for generation, ns := range []int64{1_000_000, 400_000} {
		truth{ranks: 2, steps: 20, buckets: 1, named: fmt.Sprintf("trace.g%d", generation),
			ahead:   func(int, int64) int64 { return 0 },
			delayed: func(int, int) int64 { return 0 },
			layer:   func(int, int) int64 { return ns }}.write(t, dir)
		for rank := range 2 {
			ms := float64(ns) / 1e6
			want = append(want, layerLine{"h.1", rank, ms, ms, ms, false})
		}
	}
	require.Slices(t, "layers", figures(t, pageOf(t, read(t, dir))).Layers, want)
}

func TestFiguresOfThePageAreThoseOfTheLogs(t *testing.T) {
	const steps = 1000
	dir, epochs := wholeJob(t, steps)
	began := time.Now()
	j := read(t, dir)
	text := pageOf(t, j)
	t.Logf("%d bytes of page in %v", len(text), time.Since(began))
	require.Check(t, len(text) <= 3<<20, "the page has %d bytes, more than 3 MB", len(text))
	p := figures(t, text)
	got, want := p.lines(), map[string][][2]float64{}
	for i, e := range epochs {
		x := float64(e.Epoch)
		for name, y := range map[string]float64{"loss": e.Loss, "val_loss": e.Metrics["loss"],
			"accuracy": e.Metrics["accuracy"], "rate": e.Rate, "steps/s": 50 / e.Seconds} {
			name = "epoch " + name
			want[name] = append(want[name], [2]float64{x, y})
			require.That(t, len(got[name]) > i && got[name][i] == want[name][i],
				"%s is %v, want %v first", name, got[name], want[name])
		}
	}
	want["step tokens/s"] = [][2]float64{{500, 1250}, {1000, 1500}}
	want["step of the plan bytes"] = [][2]float64{{0, 1000}, {1, 3000}, {2, 500}}
	for name := range want {
		require.Check(t, reflect.DeepEqual(got[name], want[name]), "%s is %v, want %v", name,
			got[name], want[name])
	}
	require.That(t, p.Size == 8 && len(p.Some) == steps && len(p.Attempts) == 2,
		"%d ranks, %d steps, %d attempts", p.Size, len(p.Some), len(p.Attempts))
	for i, s := range p.Some {
		late, millis := []float64{0, 0, 0, 0, 0.01, 0.02, 0.03, 0.04}, 3.52 // behind rank 3
		if s.Number%200 == 150 {
			late[5], millis = 19.97, 23.45
		}
		require.That(t, s.Number == i+1 && s.Millis == millis && slices.Equal(s.Late, late),
			"step %d is %+v, want %v ms, late %v", i+1, s, millis, late)
	}
}

func TestSlowStepsNameTheLateRank(t *testing.T) {
	dir, _ := wholeJob(t, 400)
	slow, usual := slowest(read(t, dir).steps, mostSlow)
	var numbers []int
	for _, s := range slow {
		numbers = append(numbers, s.Number)
		require.Equal(t, fmt.Sprint("step ", s.Number), s.Why, "rank 5 began its calls 20 ms late")
	}
	require.Check(t, slices.Equal(numbers, []int{150, 350}) && usual.Millis == 3.52,
		"slow steps are %v, the usual one is %+v", numbers, usual)
}

// TestASlowBucketIsNamed: by its rate beside those of others, whoever is late.
func TestASlowBucketIsNamed(t *testing.T) {
	for slow, late := range map[string]int64{"": 3_000_000, " w3,": 0, " w0,": 3_000_000} {
		dir := t.TempDir()
		truth{ranks: 4, steps: 20, buckets: 5, bytes: 2 << 20, slow: slow,
			ahead:   func(int, int64) int64 { return 0 },
			delayed: func(rank, _ int) int64 { return late * int64(rank/3) }}.write(t, dir)
		text := pageOf(t, read(t, dir))
		var got []string
		for i, c := range figures(t, text).Calls {
			millis := 0.1
			if c.Slow {
				got, millis = append(got, c.What), 0.5
				require.Check(t, i == 0, "%q is in line %d", c.What, i)
			}
			require.Equal(t, "milliseconds of "+c.What, c.Millis, millis)
		}
		require.Check(t, len(got) == strings.Count(slow, "w") && (slow == "" ||
			strings.Contains(got[0], slow)), "slow are %q, want %q", got, slow)
		require.Equal(t, "the page names it", strings.Contains(text, "<p>Slow: "), slow != "")
	}
}

func TestCSVGivesTheSameCurvesAsJSONLines(t *testing.T) {
	var curves [2]map[string][][2]float64
	for i, file := range []struct{ name, text string }{
		{"a.csv", "epoch,steps,rate,loss,seconds,accuracy,val_loss\n" +
			"1,10,0,0.5,2,0.25,0.75\n2,20,0,0.25,4,,0.5\n"},
		{"a.jsonl", `{"Epoch":1,"Steps":10,"Rate":0,"Loss":0.5,"Metrics":{"accuracy":0.25,` +
			`"loss":0.75},"Best":true,"Seconds":2}` + "\n" + `{"Epoch":2,"Steps":20,"Rate":0,` +
			`"Loss":0.25,"Metrics":{"loss":0.5},"Best":true,"Seconds":4}` + "\n"},
	} {
		dir := t.TempDir()
		put(t, filepath.Join(dir, file.name), file.text)
		put(t, filepath.Join(dir, "other.csv"), "a,b\n1,2\n")
		put(t, filepath.Join(dir, "other.jsonl"), `{"text":"epoch"}`+"\n")
		curves[i] = figures(t, pageOf(t, read(t, dir))).lines()
	}
	want := map[string][][2]float64{"epoch loss": {{1, 0.5}, {2, 0.25}},
		"epoch val_loss": {{1, 0.75}, {2, 0.5}}, "epoch accuracy": {{1, 0.25}},
		"epoch steps/s": {{1, 5}, {2, 2.5}}}
	for _, got := range curves {
		require.Check(t, reflect.DeepEqual(got, want), "%v, want %v", got, want)
	}
}

// TestEpochsAreNoSteps: those repeat more exactly, with their validation.
func TestEpochsAreNoSteps(t *testing.T) {
	dir := t.TempDir()
	truth{ranks: 2, steps: 95, buckets: 1, epoch: 10, delayed: func(int, int) int64 { return 0 },
		ahead: func(int, int64) int64 { return 0 }}.write(t, dir)
	steps := read(t, dir).steps
	for i, s := range steps {
		want := 2 + 7*(1-min(1, s.Number%10)) // the validation belongs to the step before it
		require.Check(t, s.Number == i+1 && len(s.calls) == 2*want, "step %d has %d calls, want %d",
			s.Number, len(s.calls), 2*want)
	}
	if slow, _ := slowest(steps, 3); len(steps) != 95 || len(slow) != 3 ||
		!strings.Contains(slow[0].Why, "it also has autograd.Evaluation: allgather") {
		t.Errorf("%d steps, the slowest are %+v", len(steps), slow)
	}
}

// TestClocksAreAlignedRaced: clocks that are wrong, and drift, change no figure by more than the
// bounds say, and those that may be one are left alone.
func TestClocksAreAlignedRaced(t *testing.T) {
	for name, ahead := range map[string]func(rank int, at int64) int64{
		"one clock": func(int, int64) int64 { return 0 },
		"far apart": func(rank int, _ int64) int64 { return int64(rank) * 3_600_000_000_000 },
		"drifting": func(rank int, at int64) int64 {
			return int64(rank) * (at - epochStart) / 1000
		},
	} {
		dir := t.TempDir()
		job := truth{ranks: 3, steps: 300, buckets: 2, ahead: ahead,
			delayed: func(rank, step int) int64 { return int64(rank) * 300_000 },
			notedLate: func(rank, call int) int64 { // never the first of a step
				if call%30 == 1 && call > 1 {
					return int64(rank) * 400_000
				}
				return 0
			}}
		job.write(t, dir)
		j := read(t, dir)
		for _, s := range j.steps {
			// rank 2 begins 0.3 ms after rank 1, and no bound is wider than a call
			late := s.Late[2]
			if s.Number%10 == 0 {
				late -= 0.4 // of the call that was noted late
			}
			if d := late - 0.3; d < -0.11 || d > 0.11 || len(j.steps) != job.steps {
				t.Fatalf("%s: step %d of %d: rank 2 is late by %v ms", name, s.Number,
					len(j.steps), s.Late[2])
			}
		}
		for _, trace := range j.traces {
			if n := len(trace.clock.at); (n == 0) != (name == "one clock" || trace.rank == 0) ||
				trace.clock.within > transfer {
				t.Errorf("%s: the clock of rank %d: %+v", name, trace.rank, trace.clock)
			}
		}
	}
}

func TestMergedTraceIsOnOneClock(t *testing.T) {
	dir := t.TempDir()
	truth{ranks: 2, steps: 100, buckets: 1, delayed: func(int, int) int64 { return 0 },
		ahead: func(rank int, _ int64) int64 { return int64(rank) * 1e9 }}.write(t, dir)
	var text bytes.Buffer
	require.NoError(t, read(t, dir).WriteChrome(&text))
	var file struct {
		Events []struct {
			Phase string  `json:"ph"`
			Rank  int     `json:"pid"`
			Start nanos   `json:"ts"`
			Took  float64 `json:"dur"`
			Args  struct{ Count, Seq int }
		} `json:"traceEvents"`
	}
	require.NoError(t, json.Unmarshal(text.Bytes(), &file))
	starts := [2][]nanos{}
	for _, e := range file.Events {
		if e.Phase == "X" {
			starts[e.Rank] = append(starts[e.Rank], e.Start)
		}
	}
	require.Check(t, len(starts[0]) == 201 && slices.Equal(starts[0], starts[1]),
		"%d events of rank 0, %d of rank 1; they start at %v and %v", len(starts[0]),
		len(starts[1]), starts[0][:2], starts[1][:2])
}

func TestTrafficIsThatOfTheAlgorithm(t *testing.T) {
	for _, c := range []struct {
		kind      backend.Kind
		algorithm string
		want      [3][3]int64 // of 300 bytes, root 1
	}{
		{backend.AllReduce, "one-shot", [3][3]int64{{0, 300, 300}, {300, 0, 300}, {300, 300, 0}}},
		{backend.AllReduce, "two-shot", [3][3]int64{{0, 200, 200}, {200, 0, 200}, {200, 200, 0}}},
		{backend.AllReduce, "nccl", [3][3]int64{{0, 400, 0}, {0, 0, 400}, {400, 0, 0}}},
		{backend.AllGather, "", [3][3]int64{{0, 100, 100}, {100, 0, 100}, {100, 100, 0}}},
		{backend.ReduceScatter, "nccl", [3][3]int64{{0, 200, 0}, {0, 0, 200}, {200, 0, 0}}},
		{backend.AllToAll, "nccl", [3][3]int64{{0, 100, 100}, {100, 0, 100}, {100, 100, 0}}},
		{backend.Broadcast, "", [3][3]int64{{}, {300, 0, 300}, {}}},
		{backend.Broadcast, "in-parts", [3][3]int64{{0, 0, 100}, {100, 0, 100}, {100, 0, 0}}},
		{backend.Broadcast, "nccl", [3][3]int64{{}, {0, 0, 300}, {300, 0, 0}}},
		{backend.Reduce, "one-shot", [3][3]int64{{0, 300, 0}, {}, {0, 300, 0}}},
		{backend.Reduce, "nccl", [3][3]int64{{0, 300, 0}, {}, {300, 0, 0}}},
		{backend.Reduce, "two-shot", [3][3]int64{{0, 200, 100}, {100, 0, 100}, {100, 200, 0}}},
		{backend.Gather, "", [3][3]int64{{0, 100, 0}, {}, {0, 100, 0}}},
		{backend.Scatter, "", [3][3]int64{{}, {100, 0, 100}, {}}},
	} {
		var got [3][3]int64
		for i := range 9 {
			got[i/3][i%3] = sent(c.kind, c.algorithm, 3, 1, 300, i/3, i%3)
		}
		require.Equal(t, fmt.Sprintf("%v by %q", c.kind, c.algorithm), got, c.want)
	}
}

func TestMatrixHasTheBytesOfAllCalls(t *testing.T) {
	dir := t.TempDir()
	truth{ranks: 2, steps: 10, buckets: 1, oneShot: true,
		delayed: func(int, int) int64 { return 0 },
		ahead:   func(int, int64) int64 { return 0 }}.write(t, dir)
	// a bucket of 8,000 bytes goes whole, and of an all-gather of 48 bytes a half; before them one
	// of 320
	want := int64(10*(8000+24) + 160)
	m := read(t, dir).matrix()
	require.Check(t, reflect.DeepEqual(m, [][]int64{{0, want}, {want, 0}}), "%v, want %d", m, want)
}

// TestGenerationsOfAnElasticJobAreOneJob: whose calls have the same numbers in each.
func TestGenerationsOfAnElasticJobAreOneJob(t *testing.T) {
	dir := t.TempDir()
	late := int64(0)
	for generation, ranks := range []int{3, 2, 3} {
		late += 1_000_000
		truth{ranks: ranks, steps: 20, buckets: 1, named: fmt.Sprintf("trace.g%d", generation),
			delayed: func(rank, _ int) int64 { return int64(rank) * late },
			ahead:   func(int, int64) int64 { return int64(generation) * 1e9 }}.write(t, dir)
	}
	j := read(t, dir)
	p := figures(t, pageOf(t, j))
	require.That(t, len(j.traces) == 8 && p.Size == 3 && len(p.Ranks) == 3 && len(p.Some) == 60,
		"%d traces, %d ranks, %d of them in the table, %d steps", len(j.traces), p.Size,
		len(p.Ranks), len(p.Some))
	// rank 0 sends a third of each buffer to rank 2 in two generations, twice in all-reduces
	if want := int64(2 * (20*(2*12000/3+24) + 320/3)); p.Matrix[0][2] != want {
		t.Errorf("%d bytes from rank 0 to rank 2, want %d", p.Matrix[0][2], want)
	}
	for i, s := range p.Some {
		if want := []float64{1, 0, 3}[i/20]; s.Number != i+1 || s.Late[2] != want {
			t.Errorf("step %d has number %d, and rank 2 is late by %v ms, want %v", i+1, s.Number,
				s.Late[2], want)
		}
	}
	var text bytes.Buffer
	if err := j.WriteChrome(&text); err != nil || strings.Count(text.String(),
		"DataParallel.Sync") != 20*8 {
		t.Errorf("%d calls of 160 in one trace, %v", strings.Count(text.String(),
			"DataParallel.Sync"), err)
	}
}

// TestTracesOfAnEarlierJobAreLeftOut: it had more ranks and generations, or was not elastic.
func TestTracesOfAnEarlierJobAreLeftOut(t *testing.T) {
	dir := t.TempDir()
	write := func(ranks int, name, group string, at int64) {
		truth{ranks: ranks, steps: 5, buckets: 1, named: name, group: group,
			delayed: func(int, int) int64 { return 0 },
			ahead:   func(int, int64) int64 { return at * 1e9 }}.write(t, dir)
	}
	write(4, "trace", "run-MKP7NUIKOCGG-I6MXIOPE", 0)
	for generation := range 4 {
		write(3, fmt.Sprintf("trace.g%d", generation), fmt.Sprintf(
			"run-AAAAAAAAAAAA.%d-%d", generation, 22222222+generation), 10)
	}
	for generation := range 2 {
		write(2, fmt.Sprintf("trace.g%d", generation), fmt.Sprintf(
			"run-BBBBBBBBBBBB.%d-%d", generation, 22222222+generation), 20)
	}
	j := read(t, dir)
	require.Check(t, len(j.traces) == 4 && j.size == 2 && len(j.steps) == 10,
		"%d traces of %d ranks, %d steps", len(j.traces), j.size, len(j.steps))
	const says = "of an earlier job, as are 12 traces in all: they are left out"
	require.Check(t, len(j.remarks) == 1 && strings.Contains(j.remarks[0], says), "it remarks %q",
		j.remarks)
	write(1, "trace", "run-CCCCCCCCCCCC-I6MXIOPE/split.0", 30) // a plain job again, of one rank
	if j := read(t, dir); len(j.traces) != 1 || j.size != 1 || len(j.steps) != 5 {
		t.Errorf("of a plain job: %d traces of %d ranks, %d steps", len(j.traces), j.size,
			len(j.steps))
	}
}

// TestChartsOfStrangeNumbersEnd: of one point, of none, and of numbers that a float64 cannot tell
// apart.
func TestChartsOfStrangeNumbersEnd(t *testing.T) {
	for _, points := range [][][2]float64{nil, {{1, 2}}, {{1, 1e300}, {2, -1e300}},
		{{1 << 60, 1 << 60}, {1<<60 + 256, 1<<60 + 256}}, {{1, 1e-300}, {2, 2e-300}}} {
		text := string(chart{Lines: []curve{{Points: points}}}.SVG(0))
		require.Check(t, !strings.Contains(text, "NaN") && !strings.Contains(text, "Inf") &&
			(text == "") == (points == nil), "%v: %s", points, text)
	}
}

func TestTraceOfARecorderIsRead(t *testing.T) {
	dir := t.TempDir()
	recorder := observe.New(0, 10)
	comm := backend.Collective{Kind: backend.AllReduce}
	id := recorder.Start(&backend.Call{Comm: named{}, Header: comm.Header(7, 3, backend.F32),
		Bytes: 12})
	recorder.End(id, errors.New("rank 1 is down: gone"))
	var text bytes.Buffer
	require.NoError(t, recorder.WriteChrome(&text))
	put(t, filepath.Join(dir, "trace.0.json"), text.String())
	j := read(t, dir)
	c := j.traces[0].calls[0]
	require.Check(t, c.id() == (callID{"test", 7}) && c.kind == backend.AllReduce &&
		c.Args.Bytes == 12 && c.Args.Algorithm == "allreduce-f32-12" && c.Args.Error != "" &&
		!c.syncs() && strings.Contains(pageOf(t, j), "1</b> ranks"), "%+v", c)
}

// named is a communicator of which a recorder asks no more than this.
type named struct{ backend.Communicator }

func (named) Name() string { return "test" }
func (named) Rank() int    { return 0 }

func (named) Chosen(c *backend.Collective, d backend.DType, nbytes int) string {
	return fmt.Sprintf("%v-%v-%d", c.Kind, d, nbytes)
}

func TestDamagedFilesAreRemarks(t *testing.T) {
	dir, _ := wholeJob(t, 20)
	put(t, filepath.Join(dir, "trace.8.json"), "")
	put(t, filepath.Join(dir, "trace.9.json"), `{"traceEvents":[{"na`)
	put(t, filepath.Join(dir, "more.jsonl"), `{"Epoch":`)
	put(t, filepath.Join(dir, "attempt_0", "rank_2.log"), strings.Repeat("x", 2<<20))
	j := read(t, dir)
	text := strings.Join(j.remarks, "\n")
	for _, want := range []string{"trace.8.json: the trace is", "trace.9.json: unexpected end",
		"more.jsonl: unexpected end", "rank_2.log: "} {
		require.Check(t, strings.Contains(text, want), "no %q in %s", want, text)
	}
	require.Check(t, len(j.remarks) == 4 && len(j.traces) == 8, "%d remarks, %d traces",
		len(j.remarks), len(j.traces))
	require.Fails(t, "of an empty directory", require.Err(Read(t.TempDir())), "EURYALE_TRACE=")
	require.Fails(t, "of no directory", require.Err(Read(filepath.Join(dir, "none"))),
		os.ErrNotExist)
}

func TestFailuresAndRecoveriesAreTold(t *testing.T) {
	dir, _ := wholeJob(t, 20)
	p := figures(t, pageOf(t, read(t, dir)))
	want := []attempt{
		{Number: 0, Notes: []note{
			{"2026-11-26T20:00:00.000Z", "started 8 ranks"},
			{"2026-11-26T20:05:00.000Z", "rank 3 failed first: signal: killed; its last lines:\n" +
				"    <script>alert(1)</script>\nthen ranks 0, 1 failed or were stopped"},
			{"rank 1", "allreduce(sum) of 3 f32 (call 7): rank 3 is down: signal: killed"}}},
		{Number: 1, Notes: []note{
			{"2026-11-26T20:05:01.500Z", "started 8 ranks"},
			{"2026-11-26T20:10:00.000Z", "all ranks have ended"},
			{"rank 0", "going on after step 400, from ckpt"},
			{"rank 0", "euryale: the beginning was repeated by 7 ranks"},
			{"rank 0", "euryale: step 412 was repeated by 7 ranks: it is done 0.03 s after a " +
				"rank was lost"}}},
	}
	for i, a := range want {
		if !reflect.DeepEqual(*p.Attempts[i], a) {
			t.Errorf("attempt %d: %+v, want %+v", i, *p.Attempts[i], a)
		}
	}
}

func TestPageIsWellFormedAndNeedsNoOtherFile(t *testing.T) {
	dir, _ := wholeJob(t, 300)
	text := pageOf(t, read(t, dir))
	known := strings.Fields("html head meta link title style body h1 h2 p b div figure " +
		"figcaption span output svg line text polyline polygon circle rect select option table " +
		"tr th td pre script")
	ids := map[string]bool{}
	d := xml.NewDecoder(strings.NewReader(text))
	for {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		require.NoError(t, err)
		e, ok := token.(xml.StartElement)
		require.Check(t, !ok || slices.Contains(known, e.Name.Local), "an element %s", e.Name.Local)
		for _, a := range e.Attr {
			if a.Name.Local == "id" && ids[a.Value] {
				t.Errorf("two elements %s", a.Value)
			}
			ids[a.Value] = ids[a.Value] || a.Name.Local == "id"
			if a.Name.Local == "src" || a.Name.Local == "href" && a.Value != "data:," {
				t.Errorf("%s leads to %s", e.Name.Local, a.Value)
			}
		}
	}
	for _, no := range []string{"http:", "https:", "url(", "@import", "fetch(", "ZgotmplZ", "NaN"} {
		require.Check(t, !strings.Contains(text, no), "the page has %q", no)
	}
}

// TestBrowserShowsThePageWithoutErrors: in light, dark and on a narrow screen its script runs to
// the end and has no error.
func TestBrowserShowsThePageWithoutErrors(t *testing.T) {
	browser := ""
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome"} {
		if path, err := exec.LookPath(name); err == nil {
			browser = path
			break
		}
	}
	if browser == "" || os.Getenv("EURYALE_FULL") != "1" {
		t.Skip("needs a Chromium, and EURYALE_FULL=1, since it takes seconds")
	}
	dir, _ := wholeJob(t, 300)
	text := pageOf(t, read(t, dir))
	// What happens to the page when somebody uses it.
	text = strings.Replace(text, "</body>", `<script>
choice.selectedIndex = 1; choice.dispatchEvent(new Event("change"));
const chart = document.querySelector("svg[data-chart='1']"), box = chart.getBoundingClientRect();
chart.dispatchEvent(new PointerEvent("pointermove", {clientX: box.right}));
document.querySelector(".step:not([hidden]) rect title").parentNode.dispatchEvent(
  new PointerEvent("pointerover", {bubbles: true}));
</script></body>`, 1)
	path := filepath.Join(dir, "page.html")
	put(t, path, text)
	for _, more := range [][]string{{"--window-size=1200,900"},
		{"--window-size=500,900", "--blink-settings=preferredColorScheme=0"}} {
		cmd := exec.CommandContext(t.Context(), browser, append(more, "--headless", "--no-sandbox",
			"--disable-gpu", "--user-data-dir="+t.TempDir(), "--enable-logging=stderr",
			"--dump-dom", "file://"+path)...)
		var dom, log bytes.Buffer
		cmd.Stdout, cmd.Stderr = &dom, &log
		err := cmd.Run()
		require.That(t, err == nil, "%v\n%s", err, log.String())
		for line := range strings.Lines(log.String()) {
			require.Check(t, !strings.Contains(line, "CONSOLE"), "%v: %s", more, line)
		}
		for _, want := range []string{"<output>epoch 20: 0.1125, 0.125</output>",
			`<output id="call">rank 0: DataParallel.Sync: allreduce(avg) of w0, 1000 f32`} {
			require.Check(t, strings.Contains(dom.String(), want), "%v: the page has no %s", more,
				want)
		}
		n := strings.Count(dom.String(), `step" hidden=""`)
		require.Check(t, n == 1, "%v: %d timelines are hidden, want 1 of 2", more, n)
	}
}
