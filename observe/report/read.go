package report

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// Job is what a job has left in a directory.
type Job struct {
	name     string
	files    int
	size     int      // the number of ranks, as far as logs and traces say
	traces   []*trace // by generation and rank
	steps    []*trainStep
	plans    []memory
	curves   map[curveID]map[float64]float64
	attempts map[int]*attempt
	remarks  []string // on files that cannot be read
}

// curveID names a number that a training reports for each epoch or step.
type curveID struct{ name, over string }

// attempt holds what the logs say about one start of the ranks.
type attempt struct {
	Number int    `json:"number"`
	Notes  []note `json:"notes"`
}

// note is something that happened: with a time if the launcher reports it, otherwise with a rank.
type note struct {
	From string `json:"from"`
	Text string `json:"text"`
}

// memory is the memory of a plan, as vm writes it.
type memory struct {
	Name   string
	Arena  int64            `json:"arena_bytes"`
	Beside map[string]int64 `json:"beside"`
	Steps  []struct {
		Does  string `json:"does"`
		Bytes int64  `json:"bytes"`
	} `json:"steps"`
}

var (
	traceName   = regexp.MustCompile(`(?:\.g(\d{1,5}))?\.(\d{1,5})\.json$`)
	attemptName = regexp.MustCompile(`attempt_(\d+)[/\\](rank|launcher)_(\d+)\.log$`)
	progress    = regexp.MustCompile(`^(epoch|step) (\d+)(?:/\d+)?:((?: [\w./@-]+=\S+)+)`)
	eventful    = regexp.MustCompile(`\brank \d+ (?:\(.*\) )?(?:is down|is missing|failed)|` +
		`\brank \d+ has waited|because of rank|no sign of rank|did not take part|` +
		`^(?:panic|fatal error): |^going on after |^stopped after |` +
		`\bstep \d+ was repeated by |` +
		`the loss is (?:NaN|[+-]Inf)`)
)

const (
	notesOfRank = 6        // at most, of the log of a rank
	mostBytes   = 64 << 20 // of a file of epochs or a plan; a larger one is something else
)

// Read reads what a job has left in a directory. A damaged file, such as the trace of a rank that
// was killed, becomes a remark in the report.
//
// Errors: a directory that cannot be read, or that has no files of a job.
func Read(dir string) (*Job, error) {
	path, err := filepath.Abs(dir)
	if err == nil {
		path, err = filepath.EvalSymlinks(path)
	}
	if err != nil {
		return nil, fmt.Errorf("report: %w", err)
	}
	j := &Job{name: filepath.Base(path), curves: map[curveID]map[float64]float64{},
		attempts: map[int]*attempt{}}
	traces := map[string]traceID{}
	err = filepath.WalkDir(path, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		if m := traceName.FindStringSubmatch(path); m != nil {
			generation, _ := strconv.Atoi(m[1]) // 0 if there is none
			rank, _ := strconv.Atoi(m[2])
			traces[path] = traceID{generation, rank, m[1] != ""}
			return nil
		}
		info, err := d.Info()
		known := false
		if err == nil && (info.Size() <= mostBytes || filepath.Ext(path) == ".log") {
			known, err = j.read(path)
		}
		j.found(path, known, err)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("report: %w", err)
	}
	j.readTraces(traces)
	if j.files == 0 {
		return nil, fmt.Errorf("report: %s has neither logs nor traces%s: run a job with "+
			"EURYALE_TRACE=%s/trace euryale run --log-dir %[1]s", dir,
			strings.Join(append([]string{""}, j.remarks...), "; "), dir)
	}
	for rest := j.traces; len(rest) > 0; {
		n := 1 // of a generation
		for n < len(rest) && rest[n].generation == rest[0].generation {
			n++
		}
		align(rest[:n])
		j.steps, rest = append(j.steps, j.cut(rest[:n], len(j.steps))...), rest[n:]
	}
	j.stepCurves()
	return j, nil
}

// found counts a file of the job, or adds a remark if it cannot be read.
func (j *Job) found(path string, known bool, err error) {
	if err != nil {
		j.remarks = append(j.remarks, fmt.Sprintf("%s: %v", path, err))
	} else if known {
		j.files++
	}
}

// read reads a file other than a trace, and reports whether it belongs to a job.
func (j *Job) read(path string) (known bool, err error) {
	switch filepath.Ext(path) {
	case ".log":
		m := attemptName.FindStringSubmatch(path)
		if m == nil {
			return false, nil
		}
		number, _ := strconv.Atoi(m[1])
		rank, _ := strconv.Atoi(m[3])
		return true, j.log(path, number, rank, m[2] == "launcher")
	case ".jsonl", ".csv":
		return j.rows(path)
	case ".json":
		text, err := os.ReadFile(path)
		if !bytes.HasPrefix(text, []byte(`{"arena_bytes":`)) {
			return false, err
		}
		j.plans = append(j.plans, memory{Name: filepath.Base(path)})
		return true, json.Unmarshal(text, &j.plans[len(j.plans)-1])
	}
	return false, nil
}

// log reads the log of a rank or of the launcher.
func (j *Job) log(path string, number, rank int, launcher bool) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	a := cmp.Or(j.attempts[number], &attempt{Number: number})
	j.attempts[number] = a
	if !launcher {
		j.size = max(j.size, rank+1)
	}
	lines, noted := bufio.NewScanner(f), 0
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		line := lines.Text()
		switch {
		case launcher:
			a.launcherSays(line)
		case eventful.MatchString(line) && noted < notesOfRank:
			noted++
			a.Notes = append(a.Notes, note{fmt.Sprintf("rank %d", rank), line})
		case rank == 0:
			if m := progress.FindStringSubmatch(line); m != nil { // "epoch 3/20: loss=0.0312"
				x, _ := strconv.ParseFloat(m[2], 64)
				for _, pair := range strings.Fields(m[3]) {
					name, value, _ := strings.Cut(pair, "=")
					if y, err := strconv.ParseFloat(value, 64); err == nil {
						j.point(curveID{name, m[1]}, x, y, false)
					}
				}
			}
		}
	}
	return lines.Err()
}

// launcherSays handles a line of the launcher's log; a line without a time continues the one
// before.
func (a *attempt) launcherSays(line string) {
	at, text, _ := strings.Cut(line, " ")
	if len(at) == len("2006-01-02T15:04:05.000Z") && strings.HasSuffix(at, "Z") {
		a.Notes = append(a.Notes, note{at, text})
	} else if n := len(a.Notes); n > 0 {
		a.Notes[n-1].Text += "\n" + line
	}
}

// rows reads the output of fit.JSONLines or fit.CSV, and reports whether there were epochs.
func (j *Job) rows(path string) (known bool, err error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return false, err
	}
	var rows []map[string]float64
	if filepath.Ext(path) == ".csv" {
		var lines [][]string
		lines, err = csv.NewReader(bytes.NewReader(text)).ReadAll()
		for _, line := range lines[min(1, len(lines)):] {
			row := map[string]float64{}
			for i, field := range line {
				if x, err := strconv.ParseFloat(field, 64); err == nil {
					row[lines[0][i]] = x
				}
			}
			rows = append(rows, row)
		}
	} else {
		for line := range bytes.Lines(text) {
			var e struct {
				Epoch, Steps, Rate, Loss, Seconds float64
				Metrics                           map[string]float64
			}
			err = errors.Join(err, json.Unmarshal(line, &e))
			row := map[string]float64{"epoch": e.Epoch, "steps": e.Steps, "rate": e.Rate,
				"loss": e.Loss, "seconds": e.Seconds}
			for name, x := range e.Metrics {
				row[cmp.Or(map[string]string{"loss": "val_loss"}[name], name)] = x // as in CSV
			}
			rows = append(rows, row)
		}
	}
	rows = slices.DeleteFunc(rows, func(row map[string]float64) bool { return row["epoch"] < 1 })
	j.epochs(rows)
	return len(rows) > 0, err
}

// epochs adds the points for a file's epochs.
func (j *Job) epochs(rows []map[string]float64) {
	steps := 0.0 // before
	for _, row := range rows {
		if row["seconds"] > 0 {
			row["steps/s"] = (row["steps"] - steps) / row["seconds"]
		}
		steps = row["steps"]
		for name, y := range row {
			unset := name == "rate" && y == 0
			if !unset && !slices.Contains([]string{"epoch", "steps", "seconds"}, name) {
				j.point(curveID{name, "epoch"}, row["epoch"], y, true)
			}
		}
	}
}

// point sets a point of a curve. A point from a file replaces a printed one, which may be rounded.
func (j *Job) point(id curveID, x, y float64, file bool) {
	if j.curves[id] == nil {
		j.curves[id] = map[float64]float64{}
	}
	if _, known := j.curves[id][x]; (file || !known) && !math.IsNaN(y) && !math.IsInf(y, 0) {
		j.curves[id][x] = y
	}
}

// readTraces reads the traces of all ranks, several at once.
func (j *Job) readTraces(ids map[string]traceID) {
	paths := slices.SortedFunc(maps.Keys(ids), func(a, b string) int {
		return cmp.Or(ids[a].generation-ids[b].generation, ids[a].rank-ids[b].rank,
			strings.Compare(a, b))
	})
	traces, errs := make([]*trace, len(paths)), make([]error, len(paths))
	var all sync.WaitGroup
	for i, path := range paths {
		all.Go(func() { traces[i], errs[i] = readTrace(path, ids[path]) })
	}
	all.Wait()
	earlier := ofEarlierJobs(traces)
	for i, t := range traces {
		if j.found(paths[i], t != nil, errs[i]); t != nil && !slices.Contains(earlier, i) {
			j.traces, j.size = append(j.traces, t), max(j.size, t.rank+1)
		}
	}
	if n := len(earlier); n > 0 {
		j.remarks = append(j.remarks, fmt.Sprintf("%s: of an earlier job, as are %d traces in "+
			"all: they are left out", paths[earlier[0]], n))
	}
}

// ofEarlierJobs returns the traces of jobs before the last one: a job with fewer ranks, or fewer
// generations, does not overwrite them all.
func ofEarlierJobs(traces []*trace) (all []int) {
	var newest *trace
	called := func(t *trace) bool { return t != nil && len(t.calls) > 0 }
	for _, t := range traces {
		if called(t) && (newest == nil || t.calls[0].Start > newest.calls[0].Start) {
			newest = t
		}
	}
	for i, t := range traces {
		if called(t) && t.jobOf() != newest.jobOf() {
			all = append(all, i)
		}
	}
	return all
}
