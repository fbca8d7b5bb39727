//go:build linux

package main

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// dead is a job of two ranks, of which rank 1 dies a second after the epoch, and what rank 0 has
// said of it and when.
func dead(failure string, at time.Duration, stall time.Duration) (job, outcome) {
	j := quiet(processes, failure)
	lines := []string{
		"soak: joined rank=0 at=1000\n" + fmt.Sprintf(`soak: rank=0 error at=%d "rank 1 is down"`,
			at.Microseconds()),
		"soak: joined rank=1 at=2000\n",
	}
	o := outcome{ends: ended(1, 137, lines[0], lines[1]), struck: time.Second.Microseconds(),
		stall: stall}
	return j, o
}

func TestLateVerdictsAreFound(t *testing.T) {
	for _, test := range []struct {
		failure   string
		at, stall time.Duration
		want      bool
	}{
		{kill, 1900 * time.Millisecond, 0, false},
		{kill, 2100 * time.Millisecond, 0, true},
		{kill, 2100 * time.Millisecond, 20 * time.Millisecond, false}, // six times
		{kill, 2100 * time.Millisecond, 10 * time.Millisecond, true},
		{killed, 2100 * time.Millisecond, 0, true},
		{stop, 2100 * time.Millisecond, 0, false}, // only the timeout tells
		{stop, 2100*time.Millisecond + shortTimeout, 0, true},
		{closed, time.Minute, 0, false}, // at an unknown time
	} {
		j, o := dead(test.failure, test.at, test.stall)
		found := j.judge(o)
		is := len(found) == 1 && found[0].kind == late
		require.Check(t, is == test.want && (is || len(found) <= 0), "%+v: found %v", test, found)
	}
}

// Who has not met the others yet hears of a death by the timeout alone.
func TestVerdictsOfThoseThatHaveNotMetMayTakeTheTimeout(t *testing.T) {
	j, o := dead(killed, 3500*time.Millisecond, 0)
	o.ends[1].output = ""
	j.failure.name = absent
	found := j.judge(o)
	require.Check(t, len(found) == 0, "found %v", found)
}

func TestACutMayTakeTwoTimeoutsBeforeAllHaveMet(t *testing.T) {
	met := parted().allowed(true)
	want := promise + shortTimeout + farewell
	require.Check(t, met == want, "once all have met, %v are allowed, want %v", met, want)
	if got := parted().allowed(false); got != met+shortTimeout+asking {
		t.Errorf("before, %v are allowed, want %v", got, met+shortTimeout+asking)
	}
}

func TestLateLauncherIsFound(t *testing.T) {
	j := quiet(launched, kill)
	said := func(at int) outcome {
		text := fmt.Sprintf(
			"soak: joined rank=1 at=1\nsoak: launcher rank=1 code=137 at=%d \"x\"\n", at)
		return outcome{ends: []ending{{-1, 137, text}}, struck: 1000}
	}
	found := j.judge(said(2_900_000))
	require.Check(t, len(found) == 0, "in time: %v", found)
	if found := j.judge(said(3_100_000)); len(found) != 1 || found[0].kind != late {
		t.Errorf("late: %v", found)
	}
}

func TestPulseIsTheLatestBeatOfATime(t *testing.T) {
	began := time.Now()
	p := &pulse{skips: []skip{{began.Add(-time.Second), time.Hour}, {began.Add(time.Second), 2},
		{began.Add(2 * time.Second), 1}}}
	require.Equal(t, "worst", p.worst(began), 2)
}

// parted is a job of three machines, of two ranks each, of which machine 1 is cut off.
func parted() job {
	j := quiet(machines, cut)
	j.ranks, j.agents, j.failure.rank = 6, 3, 2
	return j
}

func TestRanksOfBothSidesOfACutBlameTheOther(t *testing.T) {
	for _, test := range []struct {
		rank int
		text string
		want bool
	}{
		{0, "rank 2 is down", true},
		{0, "because of rank 3: timeout", true},
		{5, "no sign of ranks 1, 3 for 3s", true},
		{5, "ranks 2, 3 did not join in time", true},
		{0, "rank 1 is down", false},
		{0, "rank 4 is down", false},
		{2, "rank 5 is down", true},
		{3, "rank 0 is missing", true},
		{3, "rank 2 is down", false},
		{3, "timeout", false},
	} {
		found := parted().judgeCut(test.rank, said{word: wordError, text: test.text})
		require.Check(t, (len(found) == 0) == test.want, "rank %d says %q: %v", test.rank,
			test.text, found)
	}
	found := parted().judgeCut(1, said{word: wordDone})
	require.Check(t, len(found) == 0, "all was over: %v", found)
	if found := parted().judgeCut(1, said{}); len(found) == 0 {
		t.Error("a rank that says nothing is all right")
	}
}

func TestSavesAreJudgedByWhatIsResumed(t *testing.T) {
	const saved = "soak: saves rank=0 part=%[1]d step=%[2]d\nsoak: saved rank=0 part=%[1]d " +
		"step=%[2]d at=%[3]d\n"
	const begun, resumed = "soak: saves rank=0 part=%d step=%d\n",
		"soak: resumes rank=%d part=%d step=%d\n"
	const done0, done1 = `soak: rank=0 done ""`, `soak: rank=1 done ""`
	const locked0, locked1 = `soak: rank=0 locked "job x saves there"`,
		`soak: rank=1 locked "job x saves there"`
	j := quiet(saves, inSave)
	j.delays = make([]time.Duration, 2)
	parts := func(first, second, third string) outcome {
		return outcome{parts: []outcome{
			{ends: ended(0, 0, first+done0, done1)},
			{ends: ended(0, 0, second+locked0, locked1)},
			{ends: ended(0, 0, third+done0, done1)},
		}}
	}
	two := fmt.Sprintf(saved, 0, 1, 10) + fmt.Sprintf(saved, 0, 2, 20)
	for _, test := range []struct {
		about string
		out   outcome
		want  string
	}{
		{"the last one", parts(two, "", fmt.Sprintf(resumed, 0, 0, 2)), ""},
		{"an older one", parts(two, "", fmt.Sprintf(resumed, 0, 0, 1)), wrong},
		{"one rank an older one", parts(two, "", fmt.Sprintf(resumed+resumed, 0, 0, 2, 1, 0, 1)),
			wrong},
		{"none", parts(two, "", "soak: resumes rank=0 nothing\n"), wrong},
		{"none, as there is none", parts("", "", "soak: resumes rank=0 nothing\n"), ""},
		{"one that was interrupted", parts(two+fmt.Sprintf(begun, 0, 3), "",
			fmt.Sprintf(resumed, 0, 0, 3)), ""},
		{"the one before it", parts(two+fmt.Sprintf(begun, 0, 3), "",
			fmt.Sprintf(resumed, 0, 0, 2)), ""},
		{"the last of two jobs", parts(two, fmt.Sprintf(saved, 1, 1, 30),
			fmt.Sprintf(resumed, 0, 1, 1)), ""},
		{"the first of two jobs", parts(two, fmt.Sprintf(saved, 1, 1, 30),
			fmt.Sprintf(resumed, 0, 0, 2)), wrong},
	} {
		found := j.judge(test.out)
		require.Check(t, len(found) > 0 == (test.want != "") &&
			(len(found) <= 0 || found[0].kind == test.want), "%s: found %v", test.about, found)
	}
	o := parts(two, "", fmt.Sprintf(resumed, 0, 0, 2))
	o.parts[2].ends[0].output = strings.ReplaceAll(o.parts[2].ends[0].output, done0, locked0)
	if found := j.judge(o); len(found) == 0 || found[0].kind != wrong {
		t.Errorf("a lock outlives its process: found %v", found)
	}
}
