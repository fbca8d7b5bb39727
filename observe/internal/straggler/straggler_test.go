package straggler

import (
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

const ms = time.Millisecond

// step is a step of n ranks that take 30 ms, of which 20 ms are busy, but for what change says.
func step(n int, change func(s []Sample)) []Sample {
	all := make([]Sample, n)
	for r := range all {
		all[r] = Sample{Process: int64(r), Time: 30 * ms, Exposed: 10 * ms, CPU: 20 * ms}
	}
	change(all)
	return all
}

// add adds a step to tallies, and returns how late the ranks were.
func add(samples []Sample, to ...*Tally) []time.Duration {
	var c Comparison
	told := make([][]float64, len(samples))
	for r := range samples {
		told[r] = append([]float64{-1}, samples[r].Put()...)
	}
	for range 2 { // it is used again
		c.Compare(told)
	}
	for _, t := range to {
		t.Add(&c)
	}
	return c.Behind
}

// lateBy makes a rank late, for which the others wait.
func lateBy(all []Sample, rank int, d time.Duration) {
	for r := range all {
		all[r].Time += d
		if r != rank {
			all[r].Exposed += d
		}
	}
}

func TestADelayOfOneRankIsNamedWithItsCause(t *testing.T) {
	for cause := range Causes {
		var all, recent Tally
		recent.Keep = 15.0 / 16
		for range 100 {
			add(step(8, func([]Sample) {}), &recent)
		}
		for n := range 3 {
			samples := step(8, func(s []Sample) {
				lateBy(s, 3, 20*ms)
				switch {
				case cause == Computation:
					s[3].CPU += 20 * ms
				case cause < Computation && n < 2: // the files of the system are read after a step
					s[3].Noted[cause] = 20 * ms
				}
				for r := range s { // which all have
					s[r].Noted[CPUContention] += 5 * ms
					s[r].Noted[PageFaults] += 2 * ms
				}
			})
			if behind := add(samples, &all, &recent); behind[3] != 20*ms || behind[2] != 0 {
				t.Fatalf("%v: behind are %v", cause, behind)
			}
		}
		// 7 ranks wait for 20 of 30 ms of collectives, and rank 3 for 10
		want := Verdict{Rank: 3, Late: 20 * ms, Share: 140. / 220, Cause: cause}
		if got := all.Verdicts(); len(got) != 1 || got[0] != want {
			t.Errorf("%v: the verdicts are %+v, want %+v", cause, got, want)
		}
		if got := recent.Verdicts(); len(got) != 1 || got[0].Rank != 3 || got[0].Cause != cause {
			t.Errorf("%v: the verdicts of the last steps are %+v", cause, got)
		}
	}
}

// TestAllRanksAreComparedWithTheirPast: by a slowdown that no rank has alone, with its cause, and
// not by one of a tenth, nor before there is a past.
func TestAllRanksAreComparedWithTheirPast(t *testing.T) {
	for cause := range Causes {
		recent, past := Tally{Keep: 15.0 / 16}, Past{}
		run := func(steps int, change func(s *Sample)) (Verdict, bool) {
			for range steps {
				add(step(4, func(s []Sample) {
					for r := range s {
						s[r].Noted[PageFaults] = 9 * ms // as always
						change(&s[r])
					}
				}), &recent)
				past.Add(&recent)
			}
			return past.Verdict(&recent)
		}
		slow := func(s *Sample) {
			s.Time += 10 * ms
			if cause == Computation {
				s.CPU += 10 * ms
			} else if cause < Computation {
				s.Noted[cause] += 10 * ms
			}
		}
		_, early := run(10, func(s *Sample) { s.Time *= 3 })
		_, before := run(300, func(*Sample) {})
		_, tenth := run(100, func(s *Sample) { s.Time += 3 * ms })
		require.Check(t, !early && !before && !tenth, "%v: verdicts %v, %v, %v", cause, early,
			before, tenth)
		v, slower := run(200, slow)
		v.Late = v.Late.Round(ms / 10)
		require.Check(t, slower && v.Share > 0.249 && v.Share < 0.251, "%v: a share of %v", cause,
			v.Share)
		v.Share = 0
		require.Equal(t, "the verdict", v, Verdict{Rank: AllRanks, Late: 10 * ms, Cause: cause})
		require.Check(t, strings.HasPrefix(v.String(), "all ranks: a step takes 10 ms more"), "%v",
			v)
	}
}

func TestCausesThatExplainLittleAreNotNamed(t *testing.T) {
	for _, test := range []struct {
		what   string
		change func(s []Sample)
		want   Cause
	}{
		{"a third", func(s []Sample) { s[3].Noted[Loader] = 7 * ms }, Waiting},
		{"the larger", func(s []Sample) {
			s[3].Noted[Loader], s[3].Noted[GarbageCollection] = 12*ms, 9*ms
		}, Loader},
		{"the system first", func(s []Sample) {
			s[3].Noted[Loader], s[3].Noted[CPUContention] = 25*ms, 50*ms
		}, CPUContention},
		{"what all ranks have", func(s []Sample) {
			for r := range s {
				s[r].Noted[Loader] = 100 * ms
			}
		}, Waiting},
		{"one process", func(s []Sample) {
			for r := range s {
				s[r].Process = 1
			}
		}, Computation},
		{"a system that counts nothing", func(s []Sample) {
			for r := range s {
				s[r].CPU = 0
			}
		}, Computation},
	} {
		var tally Tally
		add(step(8, func(s []Sample) {
			lateBy(s, 3, 20*ms)
			test.change(s)
		}), &tally)
		if got := tally.Verdicts(); len(got) != 1 || got[0].Cause != test.want {
			t.Errorf("%s: the verdicts are %+v, want %v", test.what, got, test.want)
		}
	}
}

func TestWaitingIsDividedAmongThoseWaitedFor(t *testing.T) {
	for _, test := range []struct {
		busy, late []time.Duration
		caused     []float64 // in milliseconds
		named      []int
	}{
		{[]time.Duration{1 * ms, 9 * ms}, []time.Duration{0, 8 * ms}, []float64{0, 8}, []int{1}},
		{[]time.Duration{9 * ms, 1 * ms, 1 * ms, 9 * ms}, []time.Duration{8 * ms, 0, 0, 8 * ms},
			[]float64{8, 0, 0, 8}, []int{0, 3}},
		{[]time.Duration{1 * ms, 3 * ms, 9 * ms}, []time.Duration{0, 0, 6 * ms},
			[]float64{0, 1, 13}, []int{2}},
		{[]time.Duration{5 * ms}, []time.Duration{0}, []float64{0}, nil},
		{[]time.Duration{5 * ms, 5 * ms}, []time.Duration{0, 0}, []float64{0, 0}, nil},
	} {
		var tally Tally
		samples := make([]Sample, len(test.busy))
		for r, d := range test.busy { // a rank's own exchange is not counted before its end
			samples[r] = Sample{Process: int64(r), Time: d}
		}
		late := add(samples, &tally)
		var caused []float64
		var named []int
		for r := range tally.ranks {
			caused = append(caused, tally.ranks[r].caused/1e6)
		}
		for _, v := range tally.Verdicts() {
			named = append(named, v.Rank)
		}
		if !slices.Equal(late, test.late) || !slices.Equal(caused, test.caused) ||
			!slices.Equal(named, test.named) {
			t.Errorf("%v: late %v, caused %v, named %v; want %+v", test.busy, late, caused, named,
				test)
		}
	}
}

// A rank that is stopped in the middle of a collective has not been busy. Others see that it is
// late: three of four have waited for rank 2, and one of them less.
func TestARankIsLateInTheMiddleOfACollective(t *testing.T) {
	var tally Tally
	behind := add(step(5, func(s []Sample) {
		for r, d := range []time.Duration{0: 9 * ms, 1: 8 * ms, 3: 2 * ms, 4: 0} {
			s[r].For, s[r].Waited = 2, d
		}
		s[2].For, s[4].For, s[4].Waited = 4, 0, ms
		s[2].Noted[Stopped] = time.Second
	}), &tally)
	require.Slices(t, "behind", behind, []time.Duration{0, 0, 2 * ms, 0, 0})
	want := []Verdict{{Rank: 2, Late: 2 * ms, Share: 19. / 50, Cause: Stopped}}
	require.Slices(t, "the verdicts", tally.Verdicts(), want)
}

// Two ranks that straggle by turns are a machine's jitter.
func TestRanksThatAreLateInTurnAreNotNamed(t *testing.T) {
	var tally Tally
	for n := range 10 {
		add(step(2, func(s []Sample) { lateBy(s, n%2, 10*ms) }), &tally)
	}
	require.Equal(t, "the verdicts", len(tally.Verdicts()), 0)
}

func TestReportHasAtMostTenLines(t *testing.T) {
	for late, want := range map[int]int{0: 2, 1: 2, 9: 10, 12: 10} {
		var tally Tally
		add(step(128, func(s []Sample) {
			for r := range late {
				s[r].Exposed = 0
				s[r].Noted[GarbageCollection] = 10 * ms
				s[r].Heap = 512e6
			}
		}), &tally)
		least := tally.ranks[0].caused
		for r := range late { // each is above the least share
			tally.ranks[r].caused = max(least, leastShare*119*10e6*1.1)
		}
		var b strings.Builder
		require.NoError(t, tally.Report(&b))
		lines := strings.Split(strings.TrimSpace(b.String()), "\n")
		require.Check(t, len(lines) == want, "%d stragglers: %d lines, want %d:\n%s", late,
			len(lines), want, b.String())
		require.Check(t, (late != 1 || strings.Contains(lines[1], "rank 0 was late by 10 ms a "+
			"step, 1")) && (late != 1 || strings.Contains(lines[1], "collection of 512 MB; set "+
			"GOMEMLIMIT")), "the line is %q", lines[1])
	}
	var b strings.Builder
	if err := new(Tally).Report(&b); err != nil || !strings.Contains(b.String(), "no steps") {
		t.Errorf("of nothing: %q, %v", b.String(), err)
	}
}

func TestSamplesTravelAsNumbers(t *testing.T) {
	s := Sample{Process: 1<<52 - 1, Time: 3 * ms, Exposed: ms, CPU: 2 * ms, Heap: 1 << 40, For: 3,
		Waited: 4 * ms}
	for c := range s.Noted {
		s.Noted[c] = time.Duration(c) * ms
	}
	if numbers := s.Put(); len(numbers) != Numbers || !reflect.DeepEqual(Get(numbers), s) {
		t.Errorf("%+v comes back as %+v", s, Get(numbers))
	}
}

func TestNoStepWaitsForFilesRaced(t *testing.T) {
	first, reading := true, make(chan struct{})
	p := Open(func() time.Duration {
		if first {
			first = false
			return 0
		}
		<-reading
		return time.Hour
	})
	defer p.Close()
	p.files.rest = time.Time{} // it is time to
	for range 3 {
		p.Look(false)
		var s Sample
		if p.Sample(&s); s.Noted[ClockThrottling] != 0 {
			t.Errorf("it notes %v before it has read the files", s.Noted)
		}
	}
	close(reading)
	p.looks.Wait()
	var s Sample
	if p.Sample(&s); s.Noted[ClockThrottling] != time.Hour {
		t.Errorf("it notes %v", s.Noted)
	}
}

func TestFilesOfTheSystemAreRead(t *testing.T) {
	root := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		name = filepath.Join(root, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(name), 0o700))
		require.NoError(t, os.WriteFile(name, []byte(text), 0o600))
	}
	const clock = "sys/devices/system/cpu/cpu1/thermal_throttle/core_throttle_total_time_ms"
	write("proc/self/cgroup", "4:memory:/m\n3:cpu,cpuacct:/pod/c\n0::/unified\n")
	write("sys/fs/cgroup/cpu,cpuacct/pod/cpu.stat", "nr_throttled 1\nthrottled_time 1000\n")
	write("sys/fs/cgroup/unified/cpu.stat", "usage_usec 5\nthrottled_usec 7\n")
	write("proc/self/task/1/schedstat", "100 5000 1\n")
	write("proc/self/task/2/schedstat", "100 9000000 1\n")
	write("proc/stat", "cpu  1 2 3 4 5 6 7 100 0 0\ncpu0 1\ncpu1 1\nintr 5\n")
	write(clock, "11\n")
	f := openFiles(root)
	gpu := ms
	f.throttledGPU = func() time.Duration { return gpu }
	look := func(late bool) (noted [Noted]time.Duration) {
		if f.due(late) {
			f.look()
		}
		move(&noted, &f.noted)
		return noted
	}
	if got := look(false); got != ([Noted]time.Duration{}) {
		t.Errorf("the first look notes %v: it may be of any time", got)
	}
	write("sys/fs/cgroup/cpu,cpuacct/pod/cpu.stat", "nr_throttled 1\nthrottled_time 3001000\n")
	write("sys/fs/cgroup/unified/cpu.stat", "usage_usec 5\nthrottled_usec 1007\n")
	write("proc/self/task/1/schedstat", "100 4005000 1\n")
	write("proc/self/task/2/schedstat", "100 10000000 1\n")
	write("proc/self/task/3/schedstat", "100 10000000 1\n")
	write("proc/stat", "cpu  1 2 3 4 5 6 7 103 0 0\ncpu0 1\ncpu1 1\nintr 5\n")
	write(clock, "16\n")
	gpu = 3 * ms
	f.next = f.next.Add(time.Minute) // on a busy machine this test takes as long as looks are apart
	require.Equal(t, "it looks again at once, and notes", look(false), [Noted]time.Duration{})
	f.next = time.Time{}.Add(1) // it is time for a straggler
	want := [Noted]time.Duration{CgroupThrottling: 4 * ms, ClockThrottling: 5 * ms,
		CPUContention: 15 * ms}
	require.Equal(t, "it notes", look(true), want)
	_, has := f.values[root+"/proc/self/task/3/schedstat"]
	require.Check(t, has, "it does not know the new thread")
}
