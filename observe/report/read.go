package report

import (
	"bufio"

	"cmp"
	"encoding/csv"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/euryale-ml/euryale/internal/files"
	"github.com/euryale-ml/euryale/rendezvous"
)

// Job is what a job has left in a directory.
type Job struct {
	name     string
	dir      *os.Root // while Read reads it
	files    int
	size     int      // the number of ranks, as far as logs and traces say
	traces   []*trace // by generation and rank
	steps    []*trainStep
	plans    []memory
	curves   map[curveID]map[float64]float64
	attempts map[int]*attempt
	remarks  []string // on files that cannot be read, and on what is left out

	told, points int   // bytes of notes, and points of curves
	bytes        int64 // of all files that have been read
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
	attemptName = regexp.MustCompile(`attempt_(\d{1,5})/(rank|launcher)_(\d{1,5})\.log$`)
	progress    = regexp.MustCompile(`^(epoch|step) (\d+)(?:/\d+)?:((?: [\w./@-]+=\S+)+)`)
	eventful    = regexp.MustCompile(`\brank \d+ (?:\(.*\) )?(?:is down|is missing|failed)|` +
		`\brank \d+ has waited|because of rank|no sign of rank|did not (?:join|call|take part)|` +
		`^(?:panic|fatal error): |^going on after |^stopped after |` +
		`\b(?:step \d+|the beginning) was repeated by |` +
		`the loss is (?:NaN|[+-]Inf)`)
)

// Limits on what is read: whoever has written the files, a page takes less than 1 GB of memory.
// What goes beyond is left out, and a remark says so.
const (
	notesOfRank = 6         // of the log of a rank
	mostEntries = 100_000   // of the directory and those below
	mostSize    = 4096      // ranks
	mostStarts  = 1000      // of a job: attempts
	mostPlans   = 16        //
	mostPlan    = 8 << 20   // bytes of a plan
	mostEpochs  = 16 << 20  // bytes of a file of epochs
	mostFile    = 256 << 20 // bytes of a log
	mostTraces  = 320 << 20 // bytes of all traces
	mostBytes   = 1 << 30   // of all files, those of traces included
	mostLine    = 1 << 20   // bytes
	mostText    = 4096      // bytes of a note, a name or a call
	mostTold    = 4 << 20   // bytes of all notes
	mostCurves  = 200       //
	mostRead    = 1 << 21   // points of all curves
	mostRemarks = 50        //
)

// Read reads what a job has left in a directory. A damaged file, such as the trace of a rank that
// was killed, becomes a remark in the report. Links are not followed: only regular files are read,
// which others may have written.
//
// Errors: a directory that cannot be read, or that has no files of a job.
func Read(dir string) (*Job, error) {
	path, err := filepath.Abs(dir)
	if err == nil {
		path, err = filepath.EvalSymlinks(path)
	}
	j := &Job{name: clean(filepath.Base(path)), curves: map[curveID]map[float64]float64{},
		attempts: map[int]*attempt{}}
	if err == nil {
		j.dir, err = os.OpenRoot(path)
	}
	if err != nil {
		return nil, fmt.Errorf("report: %w: give the directory that --log-dir had", err)
	}
	defer j.dir.Close()
	traces, entries := map[string]traceID{}, 0
	_ = fs.WalkDir(j.dir.FS(), ".", func(path string, d fs.DirEntry, err error) error {
		if entries++; entries > mostEntries {
			j.remark("there are more than %d files: others are left out", mostEntries)
			return fs.SkipAll
		}
		if err != nil {
			j.found(path, false, err)
		}
		if err != nil || !d.Type().IsRegular() {
			return nil
		}
		if m := traceName.FindStringSubmatch(path); m != nil {
			generation, _ := strconv.Atoi(m[1]) // 0 if there is none
			rank, _ := strconv.Atoi(m[2])
			traces[path] = traceID{generation, rank, m[1] != ""}
			return nil
		}
		known, err := j.read(path)
		j.found(path, known, err)
		return nil
	})
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

// clean is a text of a file as it is kept: without what a reader would not see, and not too long.
func clean(text string) string {
	if len(text) > mostText {
		text = strings.ToValidUTF8(text[:mostText], "") + "..."
	}
	return rendezvous.Printable(text)
}

// remark says once what is left out, or wrong with a file.
func (j *Job) remark(format string, args ...any) {
	text := clean(fmt.Sprintf(format, args...))
	if len(j.remarks) == mostRemarks {
		text = "there is more like that"
	}
	if len(j.remarks) <= mostRemarks && !slices.Contains(j.remarks, text) {
		j.remarks = append(j.remarks, text)
	}
}

// found counts a file of the job, or adds a remark if it cannot be read.
func (j *Job) found(path string, known bool, err error) {
	if err != nil {
		j.remark("%s: %v", path, err)
	} else if known {
		j.files++
	}
}

// open opens a file, of which at most so many bytes are read.
func (j *Job) open(path string, most int64) (*limited, error) {
	f, err := files.OpenIn(j.dir, path)
	if err != nil {
		return nil, err
	}
	most = max(0, min(most, mostBytes-j.bytes))
	return &limited{f, io.LimitedReader{R: f, N: most + 1}, most, &j.bytes}, nil
}

// limited is the beginning of a file.
type limited struct {
	*os.File
	left io.LimitedReader
	most int64
	sum  *int64 // of the bytes of all files
}

// Read reads, and returns an error where the rest is left out.
func (l *limited) Read(b []byte) (n int, err error) {
	n, err = l.left.Read(b)
	if *l.sum += int64(n); l.left.N == 0 {
		return n, fmt.Errorf("it has more than the %d bytes that are left for it", l.most)
	}
	return n, err
}

// read reads a file other than a trace, and reports whether it belongs to a job.
func (j *Job) read(path string) (known bool, err error) {
	kind, m := filepath.Ext(path), attemptName.FindStringSubmatch(path)
	most := map[string]int64{".log": mostFile, ".json": mostPlan, ".jsonl": mostEpochs,
		".csv": mostEpochs}[kind]
	if most == 0 || kind == ".log" && m == nil {
		return false, nil
	}
	in, err := j.open(path, min(most, mostBytes-mostTraces-j.bytes))
	if err != nil {
		return false, err
	}
	defer in.Close()
	switch kind {
	case ".log":
		number, _ := strconv.Atoi(m[1])
		rank, _ := strconv.Atoi(m[3])
		return true, j.log(in, number, rank, m[2] == "launcher")
	case ".json":
		return j.plan(in, filepath.Base(path))
	}
	return j.rows(in, kind == ".csv")
}

// plan reads the plan of a machine. Other files of JSON are not read any further.
func (j *Job) plan(in io.Reader, name string) (known bool, err error) {
	const begins = `{"arena_bytes":`
	head := make([]byte, len(begins))
	if n, _ := io.ReadFull(in, head); string(head[:n]) != begins {
		return false, nil
	}
	if len(j.plans) == mostPlans {
		return false, fmt.Errorf("a page shows %d plans", mostPlans)
	}
	text, err := io.ReadAll(in)
	m := memory{Name: clean(name)}
	if err == nil {
		err = json.Unmarshal(append(head, text...), &m)
	}
	if err == nil && (len(m.Steps) > mostCalls || len(m.Beside) > mostCurves) {
		err = fmt.Errorf("it has %d steps and %d other parts", len(m.Steps), len(m.Beside))
	}
	if err != nil {
		return false, err
	}
	for i := range m.Steps {
		m.Steps[i].Does = clean(m.Steps[i].Does)
	}
	beside := m.Beside
	m.Beside = map[string]int64{}
	for whose, n := range beside {
		m.Beside[clean(whose)] = n
	}
	j.plans = append(j.plans, m)
	return true, nil
}

// log reads the log of a rank or of the launcher.
func (j *Job) log(in io.Reader, number, rank int, launcher bool) error {
	if rank >= mostSize || len(j.attempts) == mostStarts && j.attempts[number] == nil {
		return fmt.Errorf("a page shows %d ranks and %d attempts", mostSize, mostStarts)
	}
	a := cmp.Or(j.attempts[number], &attempt{Number: number})
	j.attempts[number] = a
	lines, noted := bufio.NewScanner(in), 0
	lines.Buffer(nil, mostLine)
	if launcher {
		j.launcherSays(a, lines)
		return lines.Err()
	}
	j.size = max(j.size, rank+1)
	for lines.Scan() {
		line := lines.Text()
		switch {
		case eventful.MatchString(line) && noted < notesOfRank:
			noted++
			j.tell(a, fmt.Sprintf("rank %d", rank), line)
		case rank == 0:
			if m := progress.FindStringSubmatch(line); m != nil { // "epoch 3/20: loss=0.0312"
				x, _ := strconv.ParseFloat(m[2], 64)
				for _, pair := range strings.Fields(m[3]) {
					name, value, _ := strings.Cut(pair, "=")
					if y, err := strconv.ParseFloat(value, 64); err == nil {
						j.point(curveID{clean(name), m[1]}, x, y, false)
					}
				}
			}
		}
	}
	return lines.Err()
}

// tell adds a note to those of an attempt.
func (j *Job) tell(a *attempt, from, text string) {
	text = clean(text)
	const besides = 64 // bytes of the page
	if j.told += besides + len(text); j.told > mostTold {
		j.remark("there are more notes than a page shows: others are left out")
		return
	}
	a.Notes = append(a.Notes, note{from, text})
}

// launcherSays reads the launcher's log; a line without a time continues the one before.
func (j *Job) launcherSays(a *attempt, lines *bufio.Scanner) {
	var from string
	var text []byte
	for more := true; more; {
		more = lines.Scan()
		at, rest, _ := strings.Cut(lines.Text(), " ")
		timed := len(at) == len("2006-01-02T15:04:05.000Z") && strings.HasSuffix(at, "Z")
		if from != "" && (timed || !more) {
			j.tell(a, from, string(text))
		}
		if timed {
			from, text = clean(at), []byte(rest)
		} else if len(text) < mostText {
			text = append(append(text, '\n'), lines.Bytes()...)
		}
	}
}

// rows reads the output of fit.JSONLines or fit.CSV, and reports whether there were epochs.
func (j *Job) rows(in io.Reader, table bool) (known bool, err error) {
	lines, header, steps := bufio.NewScanner(in), []string(nil), 0.0 // before the epoch
	lines.Buffer(nil, mostLine)
	for row := map[string]float64{}; lines.Scan(); clear(row) {
		var wrong error
		if table {
			fields := strings.Split(lines.Text(), ",")
			if strings.Contains(lines.Text(), `"`) {
				fields, wrong = csv.NewReader(strings.NewReader(lines.Text())).Read()
			}
			if header == nil && !slices.Contains(fields, "epoch") {
				return false, nil // another table
			}
			for i, field := range fields[:min(len(header), len(fields))] {
				if x, err := strconv.ParseFloat(field, 64); err == nil {
					row[header[i]] = x
				}
			}
			if header == nil {
				header = fields
			}
		} else if wrong = readEpoch(lines.Bytes(), row); !known && !(row["epoch"] >= 1) {
			return false, wrong // another program's
		}
		if err = cmp.Or(err, wrong); row["epoch"] >= 1 {
			known = true
			j.epoch(row, steps)
			steps = row["steps"]
		}
	}
	return known, cmp.Or(err, lines.Err())
}

// readEpoch reads a line of fit.JSONLines, with the names of a CSV.
func readEpoch(line []byte, row map[string]float64) error {
	var e struct {
		Epoch, Steps, Rate, Loss, Seconds float64
		Metrics                           map[string]float64
	}
	err := json.Unmarshal(line, &e)
	for name, x := range e.Metrics {
		row[cmp.Or(map[string]string{"loss": "val_loss"}[name], name)] = x
	}
	row["epoch"], row["steps"], row["rate"] = e.Epoch, e.Steps, e.Rate
	row["loss"], row["seconds"] = e.Loss, e.Seconds
	return err
}

// epoch adds the points for an epoch, before which there were so many steps.
func (j *Job) epoch(row map[string]float64, steps float64) {
	if row["seconds"] > 0 {
		row["steps/s"] = (row["steps"] - steps) / row["seconds"]
	}
	for name, y := range row {
		unset := name == "rate" && y == 0
		if !unset && !slices.Contains([]string{"epoch", "steps", "seconds"}, name) {
			j.point(curveID{clean(name), "epoch"}, row["epoch"], y, true)
		}
	}
}

// point sets a point of a curve. A point from a file replaces a printed one, which may be rounded.
func (j *Job) point(id curveID, x, y float64, file bool) {
	points := j.curves[id]
	_, known := points[x]
	switch {
	case math.IsNaN(x+y) || math.IsInf(x, 0) || math.IsInf(y, 0) || known && !file:
		return
	case points == nil && len(j.curves) == mostCurves || !known && j.points == mostRead:
		j.remark("there are more curves, or points of them, than a page shows: others are left out")
		return
	case points == nil:
		points = map[float64]float64{}
		j.curves[id] = points
	}
	if points[x] = y; !known {
		j.points++
	}
}

// readTraces reads the traces of all ranks.
func (j *Job) readTraces(ids map[string]traceID) {
	paths := slices.SortedFunc(maps.Keys(ids), func(a, b string) int {
		return cmp.Or(ids[a].generation-ids[b].generation, ids[a].rank-ids[b].rank,
			strings.Compare(a, b))
	})
	traces, errs := make([]*trace, len(paths)), make([]error, len(paths))
	left := int64(mostTraces)
	for i, path := range paths {
		in, err := j.open(path, left)
		if err == nil {
			traces[i], err = readTrace(in, ids[path])
			left -= in.most + 1 - in.left.N
			in.Close()
		}
		errs[i] = err
	}
	earlier := ofEarlierJobs(traces)
	for i, t := range traces {
		if j.found(paths[i], t != nil, errs[i]); t != nil && !slices.Contains(earlier, i) {
			j.traces, j.size = append(j.traces, t), max(j.size, t.rank+1)
		}
	}
	if n := len(earlier); n > 0 {
		j.remark("%s: of an earlier job, as are %d traces in all: they are left out",
			paths[earlier[0]], n)
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
