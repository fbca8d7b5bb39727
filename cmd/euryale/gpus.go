package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/bench"
	"github.com/euryale-ml/euryale/internal/gpu"
)

// gpus are the GPUs of a machine.
type gpus struct {
	driver   string      // its version
	usable   []usableGPU // those that can be used
	problems []finding   // of the others, and of the libraries
	probe    int         // how many bytes to copy between each two
	close    func() error
}

// usableGPU is a GPU that a rank can use.
type usableGPU interface {
	backend.Device
	// device returns the GPU as a rank opens it.
	device() backend.Device
	// facts describes the GPU: its model, its place on the bus and its links.
	facts() (string, error)
	// wires says how NVLink connects it with another GPU: "18" links, "18 switch" for
	// links through NVSwitch, or "none".
	wires(other usableGPU) (string, error)
	// reach enables access of its kernels to the memory of another GPU. It reports
	// false if the machine has no peer access between the two.
	reach(other usableGPU) (bool, error)
	// fetch starts a copy by the driver from the memory of another GPU, on the default
	// queue. It needs no peer access.
	fetch(dst backend.Buffer, other usableGPU, src backend.Buffer) error
}

// kernelDriver returns what Linux knows of NVIDIA's driver.
func kernelDriver() string {
	const file = "/proc/driver/nvidia/version"
	text, err := os.ReadFile(file)
	if err != nil {
		return "this machine has no NVIDIA driver, or this container does not show it: " +
			"there is no " + file
	}
	first, _, _ := strings.Cut(string(text), "\n")
	return "this machine has a driver: " + strings.Join(strings.Fields(first), " ")
}

// describe describes the GPUs.
func (g *gpus) describe() []finding {
	facts := make([]finding, len(g.usable))
	sideBySide(g.usable, func(i int, c usableGPU) {
		text, err := c.facts()
		facts[i] = finding{c.Name(), text, err}
	})
	findings := append([]finding{{about: "driver", text: g.driver}}, facts...)
	findings = append(findings, g.problems...)
	if len(g.usable) == 0 {
		return findings
	}
	return append(findings, matrix(g.usable), algorithms(g.usable))
}

// copies tries copies between each two of the GPUs.
func (g *gpus) copies(ctx context.Context) []finding {
	if len(g.usable) == 0 {
		return nil
	}
	return probe(ctx, g.usable, g.probe)
}

// closeGPUs closes the GPUs. Until then their contexts serve the self tests, too.
func (g *gpus) closeGPUs(context.Context) []finding {
	if err := g.close(); err != nil {
		return []finding{{about: "gpu", err: err}}
	}
	return nil
}

// sideBySide calls f with all values at once.
func sideBySide[T any](values []T, f func(i int, v T)) {
	var all sync.WaitGroup
	for i, v := range values {
		all.Go(func() { f(i, v) })
	}
	all.Wait()
}

// matrix tabulates the NVLinks between the GPUs.
func matrix(usable []usableGPU) finding {
	var t table
	for _, c := range usable {
		t.endpoints = append(t.endpoints, endpoint{usableGPU: c})
	}
	for _, from := range t.endpoints {
		t.add(from, func(to endpoint) (string, error) {
			if to.usableGPU == from.usableGPU {
				return "-", nil
			}
			return from.wires(to.usableGPU)
		})
	}
	return t.finding("nvlink", "links from each GPU to each")
}

// algorithms lists the algorithms of all-reduces among one rank for each GPU.
func algorithms(usable []usableGPU) finding {
	f := finding{about: "algorithms", text: "a rank alone has nothing to exchange"}
	if len(usable) < 2 {
		return f
	}
	var devices []backend.Device
	for _, c := range usable {
		devices = append(devices, c.device())
	}
	m, err := gpu.SurveyOf(devices)
	if err != nil {
		f.text = "nccl: " + err.Error()
		return f
	}
	f.text = algorithmsText(m)
	return f
}

func algorithmsText(m gpu.Survey) string {
	text := fmt.Sprintf("all-reduces among %d %s, %v: nccl", m.Ranks, m.Model, m.Link)
	for _, a := range m.Algorithms()[1:] {
		text += ", " + a.String()
	}
	return text + "; euryale explain says which for what size"
}

// probeCopies is how many copies between two GPUs are timed, together.
const probeCopies = 10

// endpoint is a GPU in the probe, with its buffers.
type endpoint struct {
	usableGPU
	kernels  backend.Arithmetic
	src, dst backend.Buffer
	number   int    // among those of the probe
	pattern  []byte // what src holds
	got      []byte // what dst holds
}

// way is a way to copy memory from one GPU to another.
type way struct {
	about, title string
	connect      func(to, from usableGPU) (bool, error)
	pushes       bool // whether the source copies, on its default queue
	copy         func(to, from endpoint) error
}

var ways = []way{
	{
		"gpu copies", "copied by the driver, without peer access, read back and compared; GB/s",
		func(usableGPU, usableGPU) (bool, error) { return true, nil }, false,
		func(to, from endpoint) error { return to.fetch(to.dst, from.usableGPU, from.src) },
	},
	{
		"peer reads", "copied by kernels of the GPU that reads, read back and compared; GB/s " +
			"(none: no peer access)",
		func(to, from usableGPU) (bool, error) { return to.reach(from) }, false,
		func(to, from endpoint) error { return to.kernels.Copy(to.dst, from.src) },
	},
	{
		"peer writes", "copied by kernels of the GPU that writes, read back and compared; GB/s " +
			"(none: no peer access)",
		func(to, from usableGPU) (bool, error) { return from.reach(to) }, true,
		func(to, from endpoint) error { return from.kernels.Copy(to.dst, from.src) },
	},
}

// probe writes a pattern on each GPU, copies it to every GPU (itself included) in every
// way, reads it back and compares.
func probe(ctx context.Context, usable []usableGPU, nbytes int) []finding {
	endpoints, free, err := openEndpoints(usable, nbytes)
	if err != nil {
		return []finding{{about: "gpu memory", err: errors.Join(err, free())}}
	}
	problems := make([]error, len(endpoints))
	sideBySide(endpoints, func(i int, l endpoint) {
		endpoints[i].pattern, endpoints[i].got = patternOf(i, nbytes), make([]byte, nbytes)
		if err := copyAndWait(l, l.src, backend.Of(endpoints[i].pattern)); err != nil {
			problems[i] = fmt.Errorf("write to %s: %w", l.Name(), err)
		}
	})
	if err := errors.Join(problems...); err != nil {
		return []finding{{about: "gpu memory", err: errors.Join(err, free())}}
	}
	var findings []finding
	// in this order: the driver copies faster once peer access is enabled
	for _, way := range ways {
		wrong := way.compare(ctx, endpoints)
		t := table{endpoints: endpoints}
		for i, from := range endpoints {
			t.add(from, func(to endpoint) (string, error) {
				if f := wrong[to.number][i]; f.text != "" {
					return f.text, f.err
				}
				return way.speed(to, from)
			})
		}
		findings = append(findings, t.finding(way.about, fmt.Sprintf("%v %s", bench.Size(nbytes),
			way.title)))
	}
	if err := free(); err != nil {
		findings = append(findings, finding{about: "gpu memory", err: err})
	}
	return findings
}

// openEndpoints allocates memory on each GPU. free frees it, also after an error.
func openEndpoints(usable []usableGPU, nbytes int) (endpoints []endpoint, free func() error,
	err error) {
	var frees []func() error
	free = func() error {
		var errs []error
		for _, f := range frees {
			errs = append(errs, f())
		}
		return errors.Join(errs...)
	}
	for _, c := range usable {
		l := endpoint{usableGPU: c, kernels: c.Default(), number: len(endpoints)}
		for _, b := range []*backend.Buffer{&l.src, &l.dst} {
			if *b, err = c.Alloc(nbytes); err != nil {
				return nil, free, fmt.Errorf("%w: is another program on the GPU?", err)
			}
			mine := *b
			frees = append(frees, func() error { return c.Free(mine) })
		}
		endpoints = append(endpoints, l)
	}
	return endpoints, free, nil
}

// patternOf returns bytes that differ between GPUs and do not repeat.
func patternOf(gpu, nbytes int) []byte {
	b := make([]byte, (nbytes+7)/8*8)
	for i := 0; i < len(b); i += 8 {
		binary.NativeEndian.PutUint64(b[i:], uint64(i/8+1)*0x9e3779b97f4a7c15^uint64(gpu)<<56)
	}
	return b[:nbytes]
}

// compare copies from each GPU to each, to different ones at once, and returns what is wrong, by
// target and by source.
func (w way) compare(ctx context.Context, endpoints []endpoint) [][]finding {
	wrong := make([][]finding, len(endpoints))
	sideBySide(endpoints, func(i int, to endpoint) {
		for _, from := range endpoints {
			verdict, err := w.try(ctx, to, from)
			wrong[i] = append(wrong[i], finding{text: verdict, err: err})
		}
	})
	return wrong
}

// try copies from one GPU to another, and returns what is wrong.
func (w way) try(ctx context.Context, to, from endpoint) (verdict string, err error) {
	if err := context.Cause(ctx); err != nil {
		return "not tried", err
	}
	possible, err := w.connect(to.usableGPU, from.usableGPU)
	if err != nil || !possible {
		return "none", err
	}
	if err := errors.Join(to.kernels.Zero(to.dst), drain(to)); err != nil {
		return "failed", err
	}
	if err := errors.Join(w.copy(to, from), drain(w.doer(to, from))); err != nil {
		return "failed", err
	}
	if err := copyAndWait(to, backend.Of(to.got), to.dst); err != nil {
		return "failed", err
	}
	if err := compare(to.got, from.pattern); err != nil {
		return "wrong", err
	}
	return "", nil
}

// speed returns how fast one GPU copies to another.
func (w way) speed(to, from endpoint) (string, error) {
	began := time.Now()
	for range probeCopies {
		if err := w.copy(to, from); err != nil {
			return "failed", err
		}
	}
	e, err := w.doer(to, from).Default().Record()
	if err == nil {
		err = bench.Await(e)
	}
	if err != nil {
		return "failed", err
	}
	seconds := time.Since(began).Seconds()
	return fmt.Sprintf("%.1f", float64(probeCopies*len(to.got))/seconds/1e9), nil
}

// doer returns the endpoint that copies.
func (w way) doer(to, from endpoint) endpoint {
	if w.pushes {
		return from
	}
	return to
}

// compare returns an error that says where bytes differ and what to check.
func compare(got, want []byte) error {
	if bytes.Equal(got, want) {
		return nil
	}
	wrong, first := 0, -1
	for i := range got {
		if got[i] != want[i] {
			if wrong++; first < 0 {
				first = i
			}
		}
	}
	return fmt.Errorf("%d of %d bytes arrived wrong, the first at %d: training would go wrong "+
		"too. Look for Xid lines in dmesg; where GPUs are connected by PCIe, switch IOMMU and "+
		"ACS off, or set NCCL_P2P_DISABLE=1", wrong, len(want), first)
}

// copyAndWait copies between the host and a GPU, and waits.
func copyAndWait(l endpoint, dst, src backend.Buffer) error {
	if err := l.kernels.Move(dst, src); err != nil {
		return err
	}
	return drain(l)
}

// drain waits for what was started on a GPU.
func drain(l endpoint) error {
	e, err := l.Default().Record()
	if err != nil {
		return err
	}
	return e.Join(context.Background())
}

// table holds the results of one way.
type table struct {
	endpoints []endpoint
	rows      [][]string // one for each source
	problems  []error
}

// add adds the row of one source.
func (t *table) add(from endpoint, try func(to endpoint) (string, error)) {
	row := make([]string, len(t.endpoints))
	for j, to := range t.endpoints {
		var err error
		if row[j], err = try(to); err != nil {
			t.problems = append(t.problems, fmt.Errorf("%s to %s: %w", from.Name(), to.Name(), err))
		}
	}
	t.rows = append(t.rows, row)
}

func (t table) finding(about, title string) finding {
	text := fmt.Sprintf("%s:\n%s", title, t)
	if err := errors.Join(t.problems...); err != nil {
		return finding{about: about, err: fmt.Errorf("%s\n%w", text, err)}
	}
	return finding{about: about, text: text}
}

// String lays the table out.
func (t table) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%-9s", "from \\ to")
	for _, l := range t.endpoints {
		fmt.Fprintf(&b, " %9s", l.Name())
	}
	for i, row := range t.rows {
		fmt.Fprintf(&b, "\n%9s", t.endpoints[i].Name())
		for _, cell := range row {
			fmt.Fprintf(&b, " %9s", cell)
		}
	}
	return b.String()
}
