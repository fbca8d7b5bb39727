//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"syscall"
	"time"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
)

const (
	// savings is how many steps the jobs that save train, and how often they save.
	savings = 6
	// resumes is the part that resumes what the parts before it have saved.
	resumes = 2
)

// progress is what a checkpoint says of where it is from.
type progress struct{ Part, Step int }

// partOf returns one of the jobs that save to one directory: 0, to which the failure happens, and 1
// at the same time, and then the one that resumes.
func (j job) partOf(part int) job {
	j.part, j.agents = part, 1
	j.delays = slices.Clone(j.delays)
	if part > 0 {
		j.failure.name = none
	}
	for rank := range j.delays {
		// The other job is later, or the kill would find that one saving.
		j.delays[rank] += time.Duration(part%resumes) * j.failure.after
	}
	return j
}

// lockSays matches the error of Save in a directory that another job saves to.
var lockSays = regexp.MustCompile(`directory is locked|saves there`)

func isLocked(err error) bool { return err != nil && lockSays.MatchString(err.Error()) }

// save trains and saves each step, from what is in the directory if the part resumes.
func (m *member) save() error {
	t := &training{comm: m.layers[0], who: 100 * m.job.part, g: gorgonia.NewGraph()}
	for k, n := range []int{3, 500} {
		t.data, t.params = append(t.data, t.vector("x", k, n)),
			append(t.params, t.vector("w", k, n))
	}
	d, err := autograd.New(t.comm, t.params, autograd.WithSum())
	if err != nil {
		return err
	}
	if err = m.saveAll(t, d); err != nil && m.job.abrupt {
		return err
	}
	return errors.Join(err, d.Close())
}

func (m *member) saveAll(t *training, d *autograd.DataParallel) error {
	vm, err := t.machine(d)
	if err != nil {
		return err
	}
	defer vm.Close()
	dir, at := os.Getenv(envDir), progress{Part: m.job.part}
	momentum := &solver.Momentum{Rate: rate, Momentum: 0.5}
	if m.job.part == resumes {
		switch err := d.Load(dir, momentum, &at); {
		case errors.Is(err, fs.ErrNotExist):
			fmt.Printf("soak: resumes rank=%d nothing\n", m.rank)
		case err != nil:
			return fmt.Errorf("load: %w", err)
		default:
			fmt.Printf("soak: resumes rank=%d part=%d step=%d\n", m.rank, at.Part, at.Step)
		}
		t.who = 100 * at.Part
	}
	for ; at.Step < savings; at.Step++ {
		if err := t.follows(at.Step); err != nil {
			return err
		}
		if err := t.step(d, vm, momentum, at.Step); err != nil {
			return err
		}
		if err := m.saveOne(d, dir, momentum, progress{at.Part, at.Step + 1}); err != nil {
			return err
		}
	}
	return t.follows(savings)
}

// saveOne saves once. The rank may be killed meanwhile.
func (m *member) saveOne(d *autograd.DataParallel, dir string, solver gorgonia.Solver,
	at progress) error {
	f := m.job.failure
	if f.name == inSave && m.rank == f.rank && at.Step == 1+f.step%savings {
		time.AfterFunc(f.after/60, func() { syscall.Kill(os.Getpid(), syscall.SIGKILL) })
	}
	fmt.Printf("soak: saves rank=%d part=%d step=%d\n", m.rank, at.Part, at.Step)
	if err := d.Save(dir, solver, at); err != nil {
		return err
	}
	fmt.Printf("soak: saved rank=%d part=%d step=%d at=%d\n", m.rank, at.Part, at.Step,
		time.Now().UnixMicro())
	return nil
}

// follows compares the parameters with those after some steps: each with the bits that the formula
// of Momentum gives, which is exact here.
func (t *training) follows(steps int) error {
	for k, n := range t.params {
		for i, got := range values(n) {
			var w, v float32
			for step := range steps {
				var sum float32
				for r := range t.comm.Size() {
					sum += at(k, i, step, t.who+r)
				}
				v = v/2 - rate*sum
				w += v
			}
			if got != w {
				return &wrongError{fmt.Sprintf("element %d of parameter %d is %v after %d steps "+
					"of part %d, want %v",
					i, k, got, steps, t.who/100, w)}
			}
		}
	}
	return nil
}

// The file and the directory of the user's, beside the checkpoints.
var theirs = []string{"notes.txt", filepath.Join("step-notes", "model.safetensors")}

// executeSaves runs two jobs that save to one directory, and then one that resumes.
func (j job) executeSaves(ctx context.Context, at site) (o outcome, err error) {
	dir, err := os.MkdirTemp(at.tmp, "saves-")
	if err != nil {
		return o, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	for _, name := range theirs {
		path := filepath.Join(dir, name)
		err := os.MkdirAll(filepath.Dir(path), 0o700)
		if err == nil {
			err = os.WriteFile(path, []byte(name), 0o600)
		}
		if err != nil {
			return o, err
		}
	}
	at.dir = dir
	first, err := j.partOf(0).beginJob(ctx, at)
	if err != nil {
		return o, err
	}
	second, err := j.partOf(1).beginJob(ctx, at)
	o.parts = append(o.parts, first.awaitEnd(ctx))
	if err != nil {
		return o, err
	}
	o.parts = append(o.parts, second.awaitEnd(ctx))
	third, err := j.partOf(resumes).beginJob(ctx, at)
	if err != nil {
		return o, err
	}
	o.parts = append(o.parts, third.awaitEnd(ctx))
	for _, part := range o.parts {
		o.took += part.took
		o.ends = append(o.ends, part.ends...)
	}
	o.stays = harmed(dir)
	return o, nil
}

// harmed returns what is wrong about the directory in the end: files of the user's that have
// changed, and what an interrupted Save has left.
func harmed(dir string) (found []string) {
	for _, name := range theirs {
		if text, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(text) != name {
			found = append(found, fmt.Sprintf("of the user's %s: %q, %v", name, text, err))
		}
	}
	unfinished, _ := filepath.Glob(filepath.Join(dir, ".euryale-saving*"))
	return append(found, unfinished...)
}

var (
	savesSaid   = regexp.MustCompile(`soak: saves rank=0 part=(\d+) step=(\d+)\n`)
	savedSaid   = regexp.MustCompile(`soak: saved rank=0 part=(\d+) step=(\d+) at=(\d+)\n`)
	resumesSaid = regexp.MustCompile(`soak: resumes rank=\d+ (nothing|part=(\d+) step=(\d+))\n`)
)

// judgeSaves judges the three jobs, and what the last one has resumed: the checkpoint that was
// saved last, or one whose Save was interrupted after it.
func (j job) judgeSaves(o outcome) (found []anomaly) {
	if len(o.stays) > 0 {
		found = append(found, anomaly{wrong, fmt.Sprint("the directory: ", o.stays)})
	}
	for i, part := range o.parts {
		for _, a := range j.partOf(i).judge(part) {
			found = append(found, anomaly{a.kind, fmt.Sprintf("part %d: %s", i, a.text)})
		}
	}
	want := []string{"nothing"}
	var last int64
	for _, part := range o.parts[:resumes] {
		for _, line := range savedSaid.FindAllStringSubmatch(part.said(), -1) {
			if when, _ := strconv.ParseInt(line[3], 10, 64); when >= last {
				last, want[0] = when, fmt.Sprintf("part=%s step=%s", line[1], line[2])
			}
		}
	}
	for _, part := range o.parts[:resumes] {
		begun := savesSaid.FindAllStringSubmatch(part.said(), -1)
		done := savedSaid.FindAllString(part.said(), -1)
		if len(begun) > len(done) {
			line := begun[len(done)]
			want = append(want, fmt.Sprintf("part=%s step=%s", line[1], line[2]))
		}
	}
	for _, line := range resumesSaid.FindAllStringSubmatch(o.parts[resumes].said(), -1) {
		if !slices.Contains(want, line[1]) {
			text := fmt.Sprintf("it resumes %s, want one of %v", line[1], want)
			found = append(found, anomaly{wrong, text})
		}
	}
	return found
}
