//go:build unix

package launch

import (
	"bytes"
	"encoding/gob"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/elastic"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestWrongElasticJobsAreRefused(t *testing.T) {
	for says, j := range map[string]Job{
		"at least 3 of 2 ranks": {Ranks: 2, Elastic: &Elastic{Least: 3}},
		"at least 0 of 2 ranks": {Ranks: 2, Elastic: &Elastic{}},
		"-1 on standby":         {Ranks: 2, Elastic: &Elastic{Least: 1, Standby: -1}},
		"leave the restarts":    {Ranks: 2, MaxRestarts: 1, Elastic: &Elastic{Least: 1}},
		"leave the rendezvous": {Ranks: 1, Rendezvous: "a:1", Elastic: &Elastic{Least: 1},
			Hosts: []Host{{"a", 2}}},
		"at least 3 of 4 ranks and 0 on standby: the hosts take 2": {Ranks: 2,
			Elastic: &Elastic{Least: 3, Most: 4}, Hosts: []Host{{"a", 2}}},
		"at least 1 of 4 ranks and 2 on standby: the hosts take 2": {Ranks: 1,
			Elastic: &Elastic{Least: 1, Most: 4, Standby: 2}, Hosts: []Host{{"a", 2}}},
		"the hosts take 2": {Ranks: 2, Elastic: &Elastic{Least: 1, Standby: 1},
			Hosts: []Host{{"a", 2}}},
	} {
		require.Fails(t, "Run", Run(t.Context(), j), says)
	}
}

func TestAProgramThatCannotStartIsNotReplacedForEver(t *testing.T) {
	err := Run(t.Context(), Job{Program: "/bin/false", Ranks: 2, Elastic: &Elastic{Least: 1}})
	var f *Failed
	require.Check(t, errors.As(err, &f) && f.ExitCode() == 1, "the error is %v", err)
}

// byProcess returns a program that does something else in each process, counted from 1.
func byProcess(t *testing.T, cases string) string {
	path := filepath.Join(t.TempDir(), "program.sh")
	text := `n=${EURYALE_ELASTIC#*'"Process":'}; case ${n%%,*} in ` + cases + " esac\n"
	require.NoError(t, os.WriteFile(path, []byte(text), 0o700))
	return path
}

// TestAReplacementHasTheSeatOfTheProcessThatIsLost: its GPU. Standbys do not know whose they will
// take.
func TestAReplacementHasTheSeatOfTheProcessThatIsLost(t *testing.T) {
	for standby, want := range []string{"1:1\n2:2\n3:2\n4:2\n",
		"1:0\n2:0\n3:0\n4:0\n5:0\n"} {
		said := filepath.Join(t.TempDir(), "said")
		program := byProcess(t, fmt.Sprintf(`*) s=${EURYALE_ELASTIC#*'"Seat":'}
			echo ${n%%%%,*}:${s%%%%,*} >>%[1]s;; esac
			case ${n%%%%,*} in 2|3) kill -9 $$;;
			*) until grep -q ^%[2]d: %[1]s; do sleep 0.02; done;; `,
			said, 4+standby))
		job := Job{Program: program, Ranks: 2, Elastic: &Elastic{Least: 1, Standby: standby}}
		require.Report(t, Run(t.Context(), job))
		text, err := os.ReadFile(said)
		got := strings.Join(slices.Sorted(strings.Lines(string(text))), "")
		require.Check(t, err == nil && got == want,
			"with %d on standby the seats are %q, %v, want %q", standby, got, err, want)
	}
}

func TestReplacementsHaveLogsAndTheFirstProcessHasTheInput(t *testing.T) {
	input := filepath.Join(t.TempDir(), "input")
	require.NoError(t, os.WriteFile(input, []byte("input\n"), 0o600))
	in := require.Value(os.Open(input))(t)
	defer in.Close()
	logs, up := filepath.Join(t.TempDir(), "logs"), filepath.Join(t.TempDir(), "up")
	program := byProcess(t, "1) cat; kill -9 $$;; 2) until [ -e "+up+" ]; do sleep 0.02; done;; "+
		"*) echo number $n; >"+up+";;")
	require.NoError(t, Run(t.Context(), Job{Program: program, Ranks: 2, Elastic: &Elastic{Least: 1},
		LogDir: logs, Stdin: in}))
	for name, says := range map[string]string{"rank_0.log": "input", "rank_2.log": "number 3",
		"launcher_0.log": "process 0 has ended (signal: killed): process 2 takes its place\n"} {
		text, err := os.ReadFile(filepath.Join(logs, "attempt_0", name))
		require.Check(t, err == nil && strings.Contains(string(text), says), "%s has %q, %v", name,
			text, err)
	}
}

func TestAProgramThatFailsInOneStepIsNotReplacedForEver(t *testing.T) {
	var notices strings.Builder
	enough := filepath.Join(t.TempDir(), "enough")
	const says = "it is not replaced, because 5 processes"
	err := Run(t.Context(), Job{Ranks: 2, Elastic: &Elastic{Least: 1},
		Program: byProcess(t, "1) while [ ! -e "+enough+" ]; do sleep 0.05; done;; *) exit 3;; "),
		Notice: func(text string) {
			fmt.Fprintln(&notices, text)
			if strings.Contains(text, says) {
				require.Report(t, os.WriteFile(enough, nil, 0o600))
			}
		}})
	if err != nil { // the first one has finished
		t.Error(err)
	}
	require.Check(t, strings.Contains(notices.String(), says), "the notices are %s",
		notices.String())
}

func TestAProcessThatASignalEndsOrTellsToEndDidNotFailByItself(t *testing.T) {
	p := pool{}
	for status, want := range map[syscall.WaitStatus]bool{exits(0): false, exits(1): true,
		exits(75): true, exits(143): false, exits(255): true, killedBy(syscall.SIGKILL): false} {
		require.Equal(t, fmt.Sprintf("status %#x", status), p.fails(ending{Status: status}), want)
	}
}

func TestNothingStartsAfterAProcessThatCannot(t *testing.T) {
	job := Job{Program: "/bin/sh", Args: []string{"-c", "exec sleep 100"}, Ranks: 3,
		Elastic: &Elastic{Least: 1}, LogDir: t.TempDir(), times: defaultTimes()}
	w := newWatch(job, job.environment(0, newMeeting(3, "127.0.0.1", "1")))
	err := w.prepare()
	if err == nil {
		w.logs, err = job.openLogs(0)
	}
	require.NoError(t, err)
	defer w.logs.close()
	name := filepath.Join(job.LogDir, "attempt_0", "rank_1.log")
	require.NoError(t, os.WriteFile(name, nil, 0o600))
	w.begin()
	if err := w.run(t.Context()); len(w.children) != 1 || !errors.Is(err, os.ErrExist) {
		t.Errorf("%d have started, %v", len(w.children), err)
	}
}

// TestAHostOfUnfitReplacementsGetsNoMore: five in a row that have done no step, however many the
// others do, whether they have ended with an error or the kernel has killed them.
func TestAHostOfUnfitReplacementsGetsNoMore(t *testing.T) {
	for _, status := range []syscall.WaitStatus{exits(1), killedBy(syscall.SIGKILL)} {
		testUnfit(t, status)
	}
}

// TestStandbysThatAreKilledAreReplaced: five at once, or one after another while they are idle.
func TestStandbysThatAreKilledAreReplaced(t *testing.T) {
	s := elasticJob(1, 2*maxFaults, host{ranks: MaxRanks})
	end := func(n int) {
		started := len(s.ranks)
		pass(s, ended{ending{rank: n, Status: killedBy(syscall.SIGKILL)}})
		require.Check(t, len(s.ranks) == started+1, "after the end of process %d none is started",
			n)
	}
	for n := range 2 * maxFaults {
		end(n + 1)
	}
	for range 2 * maxFaults {
		last := len(s.ranks) - 1
		pass(s, heard{s.pool.heard, elastic.Posted{ID: elastic.ID(last + 1)}}) // it is ready
		end(last)
	}
}

// elasticJob is a job whose processes have been started.
func elasticJob(ranks, standby int, hosts ...host) *supervisor {
	s := &supervisor{job: Job{Ranks: ranks, Elastic: &Elastic{Least: 1, Standby: standby},
		times: defaultTimes()}, patience: time.Minute}
	for i := range hosts {
		hosts[i].number = i
		s.hosts = append(s.hosts, &hosts[i])
	}
	s.pool = newPool(s.job.Elastic, elastic.Env{First: ranks}.FirstView())
	pass(s, begins{})
	return s
}

// pass gives a supervisor an event, with those that it asks for, and returns what it does besides.
func pass(s *supervisor, e event) (actions []action) { return passAt(s, time.Time{}, e) }

func passAt(s *supervisor, at time.Time, e event) (actions []action) {
	for _, a := range s.step(at, e) {
		switch a := a.(type) {
		case spawn:
			actions = append(actions, passAt(s, at, started{})...)
		case bury:
			e := heard{s.pool.heard, elastic.Dead{ID: elastic.ID(a)}}
			actions = append(actions, passAt(s, at, e)...)
		default:
			actions = append(actions, a)
		}
	}
	return actions
}

func testUnfit(t *testing.T, status syscall.WaitStatus) {
	bad, good := host{Host: Host{"bad", 9}, ranks: 9}, host{Host: Host{"good", 9}, ranks: 9}
	for _, hosts := range [][]host{{{ranks: MaxRanks}}, {bad, good}} {
		s := elasticJob(1, 0, hosts...)
		first, other := s.hosts[0], s.hosts[len(hosts)-1]
		s.ranks[0].host = other
		step, said := 0, 0
		goesOn := func(members ...elastic.ID) {
			v := elastic.First(members...)
			v.At[0].Step = step
			if len(members) > 1 {
				v.At[1] = elastic.Position{}
			}
			s.pool.goesOn(v, nil)
		}
		comes := func(host *host, steps int) {
			r := &rank{number: len(s.ranks), host: host, over: true, after: len(s.ends)}
			s.ranks = append(s.ranks, r)
			goesOn(1, elastic.ID(r.number+1))
			step += steps
			e := ending{rank: r.number, Status: status}
			s.ends = append(s.ends, e)
			if s.excludes(e) {
				said++
			}
			goesOn(1)
			step++ // of the others
		}
		for n := range 2*maxFaults - 2 {
			comes(first, map[bool]int{true: 1}[n == maxFaults-2])
		}
		if other != first {
			comes(other, 0)
		}
		require.Check(t, said == 0, "%d hosts are excluded too soon", said)
		for range 2 {
			comes(first, 0)
		}
		require.Check(t, said == 1, "it is said %d times that a host gets no more", said)
		if h, _ := s.room(); !first.unfit || other != first && h != other ||
			other == first && h != nil {
			t.Errorf("the next one is for %v, %t", h, first.unfit)
		}
	}
}

// TestAProcessThatEndsBeforeItsLastStepIsNotTheEndOfTheJob: it leaves its place without an error,
// and the others have one.
func TestAProcessThatEndsBeforeItsLastStepIsNotTheEndOfTheJob(t *testing.T) {
	var notices strings.Builder
	err := Run(t.Context(), Job{Ranks: 2, Elastic: &Elastic{Least: 1},
		Program: byProcess(t, "1) exit 0;; *) sleep 0.3; exit 3;;"),
		Notice:  func(text string) { fmt.Fprintln(&notices, text) }})
	var f *Failed
	require.Check(t, errors.As(err, &f) && f.ExitCode() == 3, "the error is %v", err)
	require.Check(t, strings.Contains(notices.String(), "process 0 has ended (exit status 0) "+
		"before its last"), "the notices are %s", notices.String())
}

// TestProcessesThatAreLeftBehindAreReplaced: the machine had no time for them, and their errors are
// not the program's.
func TestProcessesThatAreLeftBehindAreReplaced(t *testing.T) {
	for behind, want := range map[bool]int{false: maxFaults, true: 0} {
		p := &pool{view: elastic.First(1, 2), behind: map[int]bool{}}
		for n := range maxFaults {
			p.behind[n] = behind
			if e := (ending{rank: n, Status: exits(1)}); p.fails(e) {
				p.faults++
			}
		}
		require.Check(t, p.faults == want, "left behind: %t: %d have failed", behind, p.faults)
	}
}

// TestALauncherThatWasStoppedSaysSo: the processes did not wait for it, and who died first is not
// why the job has ended.
func TestALauncherThatWasStoppedSaysSo(t *testing.T) {
	for stopped, says := range map[time.Duration]string{time.Second: "rank 0 failed",
		time.Minute: "the launcher was stopped for 1m0s, and processes wait 10s for it"} {
		s := elasticJob(1, 0, host{ranks: MaxRanks})
		s.patience = 10 * time.Second
		began := time.Now()
		passAt(s, began, looked{})
		passAt(s, began.Add(stopped), looked{})
		pass(s, ended{ending{Status: killedBy(syscall.SIGKILL)}})
		err := s.outcome()
		require.Check(t, errors.As(err, new(*elastic.StoppedError)) &&
			strings.Contains(err.Error(), says), "after %v: %v", stopped, err)
	}
}

// TestAReplacementThatTrainsIsNoneInARow: also where it is one of the present ranks.
func TestAReplacementThatTrainsIsNoneInARow(t *testing.T) {
	s := elasticJob(1, 0, host{ranks: MaxRanks})
	for n := 1; n < 2*maxFaults-1; n++ {
		s.ranks = append(s.ranks, &rank{number: n, host: s.hosts[0]})
		if n == maxFaults {
			s.pool.view, s.pool.fit[n] = elastic.First(1, elastic.ID(n+1)), true
			continue
		}
		e := ending{rank: n, Status: killedBy(syscall.SIGKILL)}
		if s.ends = append(s.ends, e); s.excludes(e) {
			t.Errorf("replacement %d is the last one", n)
		}
	}
}

// TestAProcessThatHangsIsEnded: it would have its place for ever, and the
// launcher would wait for it at the end.
func TestAProcessThatHangsIsEnded(t *testing.T) {
	for _, there := range []host{{ranks: MaxRanks}, {Host: Host{"a", 1}, ranks: 1}} {
		s := elasticJob(1, 0, there)
		s.patience = 6 * s.job.times.look
		pass(s, looked{})
		s.pool.goesOn(elastic.First(2), []elastic.ID{1})
		for range 2 {
			actions := pass(s, looked{})
			require.Check(t, len(actions) == 0, "it is ended at once: %v", actions)
		}
		actions := pass(s, looked{})
		require.Check(t, len(actions) == 2 && strings.Contains(fmt.Sprint(actions[0]),
			"process 0 hangs: for 3s the others") &&
			actions[1] == action(kill{s.ranks[0]}), "it does %v", actions)
	}
}

// TestProcessesAreKilledHereAndOnHosts: and no others.
func TestProcessesAreKilledHereAndOnHosts(t *testing.T) {
	job := Job{Program: "/bin/sleep", Args: []string{"100"}, Ranks: 2, times: defaultTimes()}
	for _, h := range []*remote{nil, {host: host{Host: Host{"a", 2}, ranks: 2},
		orders: make(chan order, 4)}} {
		w := newWatch(job, nil)
		there := w
		if h != nil {
			w, there.supervisor.above = newWatch(job, nil, h), true
		}
		w.step(begins{})
		for h != nil && len(h.orders) > 0 {
			there.step(<-h.orders)
		}
		w.kill(kill{w.supervisor.ranks[1]})
		if h != nil {
			there.step(<-h.orders)
		}
		if e := (<-there.events).(ended); e.rank != 1 || e.Status != killedBy(syscall.SIGKILL) {
			t.Errorf("%+v, though process 1 is killed", e)
		}
		there.children[0].signal(syscall.SIGKILL)
		<-there.events
	}
}

func TestAHostIsToldToKillProcess0(t *testing.T) {
	var sent bytes.Buffer
	var o order
	err := errors.Join(gob.NewEncoder(&sent).Encode(order{Kill: &member{Number: 0}}),
		gob.NewDecoder(&sent).Decode(&o))
	require.Check(t, err == nil && o.Kill != nil, "%+v has come, %v", o, err)
}

// TestAProcessThatHasDoneItsLastStepDoesNotHang: it may save what it has trained, also where the
// others have left it behind in that step.
func TestAProcessThatHasDoneItsLastStepDoesNotHang(t *testing.T) {
	s := elasticJob(2, 0, host{ranks: MaxRanks})
	s.pool.goesOn(elastic.First(2), []elastic.ID{1})
	require.Equal(t, "before it has done the step it", s.pool.allows(0, time.Minute), time.Minute/2)
	pass(s, heard{0, elastic.Posted{ID: 1, Position: elastic.Position{Leaving: true}}})
	require.Equal(t, "after that it", s.pool.allows(0, time.Minute), 0)
}

// TestHostsComeAndGo: those that are listed no more are told to end and get no more processes; what
// has no room waits for the next host that is reached, which is tried until it is.
func TestHostsComeAndGo(t *testing.T) {
	a, b, c := Host{"a", 1}, Host{"b", 1}, Host{"c", 2}
	s := elasticJob(2, 0, host{Host: a, ranks: 1}, host{Host: b, ranks: 1})
	s.pool.homeless = 1 // of three ranks
	does := func(e event, want ...string) {
		t.Helper()
		var did []string
		for _, a := range pass(s, e) {
			did = append(did, fmt.Sprintf("%T %v", a, a))
		}
		require.Slices(t, fmt.Sprintf("%T", e), did, want)
	}
	on := func(h *host) (numbers []int) {
		for _, r := range s.ranks {
			if r.host == h && !r.over {
				numbers = append(numbers, r.number)
			}
		}
		return numbers
	}
	does(listed{a, b})
	does(listed{a, c}, "launch.notice host b is to be left: its processes are told to end",
		"launch.signals {1 15}", "launch.join {{c 2} }")
	does(listed{a, c})
	does(listed{a, b, c}) // b's process has not ended
	does(ended{ending{rank: 1, host: "b", Status: exits(143)}}, "launch.notice process 1 has "+
		"ended (exit status 143, as of a program that a signal ended or told to end "+
		"(terminated)): it is not replaced, since no host can take another process")
	there, away := &host{Host: c, ranks: 2}, errors.New("no route")
	does(joined{host: there, why: away}, "launch.notice host c does not take part: no route")
	does(listed{a, c}, "launch.join {{c 2} no route}")
	does(joined{host: there, why: away, before: "no route"})
	does(listed{a, c}, "launch.join {{c 2} no route}")
	does(joined{host: there, before: "no route"}, "launch.notice host c takes part")
	require.Slices(t, "on c there", on(there), []int{2, 3})
	next := elastic.First(1, 3, 4)
	next.Generation = 1
	pass(s, heard{s.pool.heard, elastic.Decided{View: next}})
	does(down{0, &HostLost{Host: "a", why: away}}, "launch.notice host a is lost: no route")
	does(ended{ending{rank: 0, host: "a", why: away}}, "launch.notice process 0 has ended (no "+
		"route): it is not replaced, since no host can take another process")
	does(listed{a, c}, "launch.join {{a 1} }")
	back := &host{Host: a, ranks: 1}
	does(joined{host: back}, "launch.notice host a takes part")
	require.Slices(t, "on a there", on(back), []int{4})
}

// TestWhatIsListedOnceDoesNotHold: a file of hosts may be read while it is written. An empty list
// never holds, and is told once.
func TestWhatIsListedOnceDoesNotHold(t *testing.T) {
	a, b := Host{"a", 1}, Host{"b", 1}
	s := elasticJob(1, 0, host{Host: a, ranks: 1}, host{Host: b, ranks: 1})
	var next []Host
	var notices []string
	s.job.Elastic.Hosts = func() ([]Host, error) { return next, nil }
	s.job.Notice = func(text string) { notices = append(notices, text) }
	w := &watch{job: s.job, supervisor: *s,
		remotes: []*remote{{orders: make(chan order, 1)}, {orders: make(chan order, 1)}}}
	for _, next = range [][]Host{{a, b}, {a}, {a, b}, {a, b}, {}, {}, {b}, {}, {b}} {
		w.list()
	}
	empty := "the hosts stay as they are: none is listed"
	require.Slices(t, "the notices", notices, []string{empty})
	w.list()
	require.Slices(t, "then the notices", notices, []string{empty,
		"host a is to be left: its processes are told to end"})
}
