//go:build unix

package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"
	"unicode"

	tea "charm.land/bubbletea/v2"

	"github.com/euryale-ml/euryale/internal/env"
	"github.com/euryale-ml/euryale/internal/exit"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// topRows are ranks of two jobs, one of which is stopped.
func topRows() []rankRow {
	return []rankRow{
		{Job: "run-B", Size: "8", Rank: 1, State: "computing", Step: 119, Loss: 0.26, Late: 0.0041,
			Exposed: 0.03, Caused: 0.61, Cause: "garbage collection", Memory: 1.24e9, GPU: 3.1e10,
			known: true},
		{Job: "run-A\x1b[2J", Size: "1", Rank: 0, State: "stopped", Memory: 4.2e7,
			Note: "no metrics: EURYALE_METRICS is not set"},
		{Job: "run-B", Size: "8", Rank: 0, State: "communicating", Step: 120, Loss: 0.25,
			Exposed: 0.12, Memory: 1.2e9, GPU: 3.1e10, known: true},
		{Job: "run-B", Size: "8", Rank: 10, State: "loading", Step: 120, Late: 0.0001,
			Exposed: 0.115, Memory: 9e8, known: true},
	}
}

func TestTopTableMarksTheSlowestRank(t *testing.T) {
	const want = `run-A\x1b[2J: 1 of 1 ranks
    RANK    STATE  STEP  LATE  EXPOSED  MEMORY  GPU
       0  stopped     -     -        -   42 MB    -  no metrics: EURYALE_METRICS is not set
run-B: 3 of 8 ranks, step 120, loss 0.25
     RANK          STATE  STEP    LATE  EXPOSED  MEMORY    GPU
        0  communicating   120  0.0 ms     12 %  1.2 GB  31 GB
  *     1      computing   119  4.1 ms      3 %  1.2 GB  31 GB  slowest: garbage collection
       10        loading   120  0.1 ms     12 %  900 MB      -
`
	var lines []string
	for line := range strings.Lines(topView(topRows())) {
		lines = append(lines, strings.TrimRight(line, " \n")+"\n")
	}
	require.Equal(t, "Join", strings.Join(lines, ""), want)
	if got := topView(nil); !strings.HasPrefix(got, "no job of yours runs on this machine") {
		t.Errorf("without jobs: %q", got)
	}
}

func TestTopModelIsRenewedUntilAKeyEndsIt(t *testing.T) {
	m, next := tea.Model(topModel{every: time.Nanosecond,
		look: func(context.Context) []rankRow { return topRows() }}), tea.Cmd(nil)
	if next = m.Init(); next == nil {
		t.Fatal("it does not look")
	}
	for range 2 {
		if m, next = m.Update(next()); next == nil || !strings.Contains(m.View().Content, "run-B") {
			t.Fatalf("it shows %q", m.View().Content)
		}
	}
	for _, key := range []tea.Key{{Code: 'q', Text: "q"}, {Code: 'c', Mod: tea.ModCtrl}} {
		_, end := m.Update(tea.KeyPressMsg(key))
		require.Check(t, end != nil && end() == tea.Quit(), "%v does not end it", key)
	}
}

// metricsOf is what rank r of a job says.
func metricsOf(r int) string {
	return fmt.Sprintf(`# TYPE euryale_rank_info gauge
euryale_rank_info{rank="%[1]d",job="run-T",size="2",backend="host"} 1
# TYPE euryale_rank_state gauge
euryale_rank_state{rank="%[1]d",state="computing"} 0
euryale_rank_state{rank="%[1]d",state="communicating"} 1
euryale_step{rank="%[1]d"} 7%[1]d
euryale_loss{rank="%[1]d"} 0.5
euryale_lateness_seconds{rank="%[1]d"} 0.00%[1]d
euryale_exposed_ratio{rank="%[1]d"} 0.25
euryale_late_cause{rank="%[1]d",cause="loader"} 0
euryale_late_cause{rank="%[1]d",cause="page_faults"} %[1]d
process_resident_memory_bytes{rank="%[1]d"} 2.5e+09
`, r)
}

func TestTopOfAddressesPrintsOneTable(t *testing.T) {
	var got []string
	for r := range 2 {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			fmt.Fprint(w, metricsOf(r))
		}))
		defer server.Close()
		got = append(got, strings.TrimPrefix(server.URL, "http://"))
	}
	code, out, errs := commandLine(append([]string{"top"}, got...)...)
	for _, want := range []string{"run-T: 2 of 2 ranks, step 71, loss 0.5\n",
		" 0  communicating    70  0.0 ms     25 %  2.5 GB",
		"*     1  communicating    71  1.0 ms     25 %  2.5 GB    -  slowest: page faults\n"} {
		require.Check(t, code == 0 && errs == "" && strings.Count(out, want) == 1,
			"code %d, %s: no %q in\n%s", code, errs, want, out)
	}
}

// TestTopSaysWhyARankIsSilent: one that is not there, asks for a secret, or talks nonsense.
func TestTopSaysWhyARankIsSilent(t *testing.T) {
	answer := func(status int, text string) string {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(status)
			fmt.Fprint(w, text)
		}))
		t.Cleanup(server.Close)
		return strings.TrimPrefix(server.URL, "http://")
	}
	hostile := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		fmt.Fprint(conn, "HTTP/1.1 401 \u202e\u009b2J\r\nContent-Length: 0\r\n\r\n")
	}))
	defer hostile.Close()
	for address, want := range map[string]string{
		strings.TrimPrefix(hostile.URL, "http://"): `answers 401 \u202e\u009b2J`,
		"127.0.0.1:1":                             "no metrics: ",
		answer(http.StatusUnauthorized, ""):       "answers 401 Unauthorized",
		answer(http.StatusOK, "\x00{{{ nonsense"): "text format parsing error",
		answer(http.StatusOK, "x 1\n"):            " is not a rank",
	} {
		code, out, errs := commandLine("top", address)
		require.Check(t, code == 0 && strings.Contains(out, want) && strings.Contains(out, address),
			"%s: code %d, %s\n%s", address, code, errs, out)
	}
	for _, wrong := range []string{"host", "[::1", "a:b:c"} {
		code, _, errs := commandLine("top", wrong)
		require.Check(t, code == exit.Usage && strings.Contains(errs, "give HOST:PORT"),
			"%s: code %d, %s", wrong, code, errs)
	}
}

// TestTopShowsACredentialToTheAddressesThatItIsGivenAndNoOthers: it follows no redirection.
func TestTopShowsACredentialToTheAddressesThatItIsGivenAndNoOthers(t *testing.T) {
	const token = "0123456789abcdef"
	t.Setenv("EURYALE_TOKEN", token)
	credential := env.MetricsCredential(os.Getenv)
	other := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		t.Error("the redirection is followed")
	}))
	defer other.Close()
	var shown string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		shown = r.Header.Get("Authorization")
		http.Redirect(w, r, other.URL+"/metrics", http.StatusFound)
	}))
	defer server.Close()
	code, out, errs := commandLine("top", strings.TrimPrefix(server.URL, "http://"))
	require.Check(t, code == 0 && strings.Contains(out, "answers 302 Found") &&
		len(credential) == 64 && shown == "Bearer "+credential && !strings.Contains(shown,
		token), "code %d, %s%s: it shows %q", code, errs, out, shown)
}

// hostile has what moves a cursor, in 7 and 8 bits, turns text round, hides or begins a line.
const hostile = "x\x1b[2J\u009b2J\r\n\t\u202e\u2066\u200b\u2028y"

// TestNoTextOfARankReachesTheTerminalAsItIs: neither a label nor the reason of an error.
func TestNoTextOfARankReachesTheTerminalAsItIs(t *testing.T) {
	label := strings.NewReplacer("\n", `\n`).Replace(hostile)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.Header.Get("Authorization") {
		case "Bearer good":
			fmt.Fprintf(w, `euryale_rank_info{rank="0",job="%[1]s",size="%[1]s"} 1
euryale_rank_state{state="%[1]s"} 1
euryale_lateness_seconds 1
euryale_late_cause{cause="%[1]s"} 1
`, label)
		case "Bearer bad":
			fmt.Fprintf(w, "euryale_step{%s 1\n", label)
		}
	}))
	defer server.Close()
	for credential, want := range map[string]string{"good": `x\x1b[2J\u009b2J`, "bad": `\x1b`} {
		t.Setenv("EURYALE_CREDENTIAL", credential)
		code, out, errs := commandLine("top", strings.TrimPrefix(server.URL, "http://"))
		require.Check(t, code == 0 && strings.Count(out, "\n") == 3 &&
			strings.Contains(out, want) && out == strings.Map(printable,
			out), "%s: code %d, %s%q", credential, code, errs, out)
	}
}

// TestErrorsAndFindingsArePrintable: they may quote files, libraries and peers.
func TestErrorsAndFindingsArePrintable(t *testing.T) {
	_, _, text := commandLine("report", filepath.Join(t.TempDir(), hostile))
	var found strings.Builder
	for _, f := range []finding{{text: hostile}, {err: errors.New(hostile)}} {
		require.NoError(t, f.write(&found))
	}
	for _, text := range []string{text, found.String()} {
		if text = strings.ReplaceAll(text, "\t", ""); !strings.Contains(text, `x\x1b[2J\u009b2J`) ||
			text != strings.Map(printable, text) {
			t.Errorf("%q", text)
		}
	}
}

// printable leaves out what does not belong into a table.
func printable(r rune) rune {
	if r == '\n' || unicode.IsPrint(r) {
		return r
	}
	return -1
}

func TestTopFindsTheRanksOfThisMachine(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("needs /proc")
	}
	job := fmt.Sprintf("run-TOP%d", os.Getpid())
	for r := range 2 {
		cmd := exec.Command("sleep", "60")
		cmd.Env = append(os.Environ(), "EURYALE_JOB="+job, fmt.Sprintf("RANK=%d", r+4),
			fmt.Sprintf("LOCAL_RANK=%d", r), "WORLD_SIZE=6", "EURYALE_CREDENTIAL=",
			"EURYALE_METRICS="+[]string{":9090", "0.0.0.0:9090"}[r],
			"EURYALE_TOKEN=0123456789abcdef")
		require.NoError(t, cmd.Start())
		defer cmd.Wait()
		defer cmd.Process.Kill()
		if r == 1 {
			_ = cmd.Process.Signal(syscall.SIGSTOP)
		}
	}
	mine := func() (rows []rankRow) {
		for _, r := range localRanks() {
			if r.Job == job {
				rows = append(rows, r)
			}
		}
		return rows
	}
	var rows []rankRow
	want := map[int][2]string{4: {"127.0.0.1:9090", "sleeping"}, 5: {"127.0.0.1:9091", "stopped"}}
	is := func(r rankRow) bool { return [2]string{r.address, r.State} == want[r.Rank] }
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); {
		// until the kernel has started both, and stopped one
		if rows = mine(); len(rows) == 2 && is(rows[0]) && is(rows[1]) {
			break
		}
		time.Sleep(5 * time.Millisecond)
	}
	for _, r := range rows {
		require.Check(t,
			is(r) && r.Size == "6" && r.Memory >= 1e4 && (r.credential != "") == (r.Rank == 5),
			"found %+v", r)
	}
	if len(rows) != 2 || strings.Contains(topView(rows), "0123456789abcdef") {
		t.Errorf("%d rows\n%s", len(rows), topView(rows))
	}
}
