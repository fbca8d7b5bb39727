package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/bench"
	"github.com/euryale-ml/euryale/internal/env"
	"github.com/euryale-ml/euryale/internal/gpu"
	"github.com/euryale-ml/euryale/internal/hierarchy"
	"github.com/euryale-ml/euryale/internal/launch"
	"github.com/euryale-ml/euryale/rendezvous"
)

// benchCmd measures a collective over a range of sizes.
type benchCmd struct {
	N          int           `short:"n" default:"${ranks}" help:"Number of ranks (default: as euryale run, one per CPU, 8 at most; here ${ranks}); under a launcher, its number counts."`
	Backend    string        `predictor:"backend" help:"Backend to measure; the first that every rank can use if not given, as for programs."`
	Collective string        `default:"allreduce" predictor:"collective" help:"allreduce, reducescatter, allgather, alltoall, broadcast, reduce, gather or scatter."`
	DType      string        `name:"dtype" default:"f32" predictor:"dtype" help:"f16, bf16, f32, f64, i32, i64 or u8."`
	Op         string        `default:"sum" predictor:"op" help:"sum, avg, prod, min or max, where the collective reduces."`
	Root       int           `help:"Root, where the collective has one."`
	Min        bench.Size    `default:"1K" help:"First size in bytes; K, M and G are powers of two."`
	Max        bench.Size    `default:"64M" help:"Largest size."`
	Factor     int           `default:"2" help:"Each size is this many times the one before."`
	Iters      int           `help:"How many calls to time; as many as fit --time if not given."`
	Time       time.Duration `default:"300ms" help:"How long the timed calls of one size should take."`
	Algorithm  string        `default:"auto" help:"auto, one-shot or two-shot."`
	Alloc      bool          `help:"Use memory of the communicator (Alloc), which all ranks can reach."`
	InPlace    bool          `help:"Use one buffer as source and destination."`
	InProc     bool          `name:"inproc" help:"Ranks are goroutines of this process instead of processes."`
	Tune       bool          `help:"Measure what choices are made by, and keep it for later programs; see below."`
	JSON       bool          `name:"json" help:"Write one JSON line for each size."`
}

// Help is what --help says below the flags' titles.
func (benchCmd) Help() string {
	return `Calls follow each other back to back. p50 and p99 are over the calls of rank 0; the
mean is the slowest rank's, and bandwidths are computed from it. Bytes are counted as in
nccl-tests: the whole buffer of an all-reduce, reduce or broadcast, and the buffer of all chunks
otherwise. Every result is verified; the command fails if an element is wrong.

On GPUs half of the time goes to batches of calls that are started without waiting in between.
stream is the time of a call in such a batch, from which bandwidths are computed; host is the
host's time to start a call. p50, p99 and mean are of calls that the host waits for one by one.

With --tune the command times Euryale's kernels against NCCL, for every collective and dtype that
has kernels, among -n ranks and over the range of sizes. With several machines, or with
EURYALE_TOPOLOGY, it also measures the links inside and between machines. It keeps the times in
the user's tuning file (EURYALE_TUNING, or euryale/tuning.json in the user's cache directory), by
which programs choose algorithms; see euryale explain. Of the other flags only --time, --backend,
--inproc and --json apply. Measure once for each number of ranks.

Examples:

	euryale bench -n 4 --backend host
	euryale bench -n 4 --tune`
}

// Run measures as one rank of a job that a launcher started, or starts the
// ranks itself. Results go to the output, notes about JSON lines to the other.
func (b *benchCmd) Run(ctx context.Context, s *streams) error {
	job, err := rendezvous.ReadEnv(env.Lookup(os.Environ()))
	if err != nil {
		return err
	}
	switch {
	case b.InProc && job.Size > 1:
		return usageError{fmt.Errorf("bench: --inproc makes its own ranks, but %s has started "+
			"this process as one of %d: start it alone", job.Launcher, job.Size)}
	case b.InProc:
		return b.asGoroutines(ctx, s)
	case job.Size > 1:
		return b.asRank(ctx, job.Size, s)
	case b.N == 1: // no launcher needed, and a process that has one ends here
		return b.asRank(ctx, 1, s)
	default:
		return b.asProcesses(ctx, s)
	}
}

// asGoroutines starts the ranks in this process.
func (b *benchCmd) asGoroutines(ctx context.Context, s *streams) error {
	c, chosen, err := b.prepare(b.N, true)
	if err != nil {
		return err
	}
	return b.goroutines(ctx, s, c, chosen...)
}

func (b *benchCmd) goroutines(ctx context.Context, s *streams, c bench.Config,
	chosen ...backend.Backend) error {
	sh := b.output(s, chosen...)
	err := euryale.Run(ctx, b.N, func(comm backend.Communicator, _ sync.Locker) error {
		return sh.measure(comm, c)
	}, chosen...)
	return errors.Join(err, sh.verdict())
}

// asProcesses starts this program once for each rank.
func (b *benchCmd) asProcesses(ctx context.Context, s *streams) error {
	if _, _, err := b.prepare(b.N, true); err != nil {
		return err // once, and not on every rank
	}
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("bench: find this program, to start it as the ranks: %w", err)
	}
	quit := make(chan os.Signal, 1)
	signal.Notify(quit, syscall.SIGQUIT) // for the ranks, to print their stacks
	defer signal.Stop(quit)
	return launch.Run(ctx, launch.Job{Program: self, Args: b.args(), Ranks: b.N, Stdout: s.out,
		Stderr: s.err, Plain: true, Signals: quit})
}

// asRank measures as one rank of a job.
func (b *benchCmd) asRank(ctx context.Context, size int, s *streams) error {
	c, chosen, err := b.prepare(size, size == 1)
	if err != nil {
		return err
	}
	// what was measured before must not say what can be
	if b.Tune && env.Hierarchy.Text(os.Getenv) == "" {
		if err := os.Setenv(string(env.Hierarchy), "always"); err != nil {
			return err
		}
	}
	comm, err := euryale.Init(ctx, chosen...)
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { comm.Abort(context.Cause(ctx)) })
	defer stop()
	sh := b.output(s, chosen...)
	err = errors.Join(sh.measure(comm, c), comm.Close())
	for _, named := range chosen {
		if c, ok := named.(io.Closer); ok {
			err = errors.Join(err, c.Close())
		}
	}
	return errors.Join(err, sh.verdict())
}

// prepare returns what to measure among P ranks, and the backend that is asked for, if one is: else
// the ranks choose. here says that all of them are on this machine.
func (b *benchCmd) prepare(P int, here bool) (c bench.Config, chosen []backend.Backend, err error) {
	if c, err = b.config(P); err != nil {
		return c, nil, usageError{err}
	}
	first, err := choose(b.Backend)
	if err == nil && b.Tune && here {
		err = tunable(first)
	}
	if b.Backend != "" {
		chosen = append(chosen, first)
	}
	return c, chosen, err
}

// maxBenchSize is above what any machine can measure, and does not overflow.
const maxBenchSize = 1 << 40

// config returns what to measure among P ranks.
func (b *benchCmd) config(P int) (bench.Config, error) {
	c := bench.Config{
		Min: b.Min, Max: b.Max, Factor: b.Factor, Iters: b.Iters, Budget: b.Time, Alloc: b.Alloc,
		InPlace: b.InPlace,
	}
	switch {
	case P < 1 || P > launch.MaxRanks:
		return c, fmt.Errorf("bench: %d ranks: there must be at least 1, and at most %d", P,
			launch.MaxRanks)
	case b.Max > maxBenchSize:
		return c, fmt.Errorf("bench: the largest size is %v: it must be at most %v", b.Max,
			bench.Size(maxBenchSize))
	}
	var kindErr, opErr, dtypeErr, algorithmErr error
	c.Collective.Kind, kindErr = backend.ParseKind(b.Collective)
	c.Collective.Op, opErr = backend.ParseReduceOp(b.Op)
	c.DType, dtypeErr = backend.ParseDType(b.DType)
	c.Collective.Algorithm, algorithmErr = parseAlgorithm(b.Algorithm)
	c.Collective.Root = b.Root
	if err := errors.Join(kindErr, opErr, dtypeErr, algorithmErr); err != nil {
		return c, fmt.Errorf("bench: %w", err)
	}
	return c, c.Check(P)
}

func parseAlgorithm(name string) (backend.Algorithm, error) {
	all := []backend.Algorithm{backend.Auto, backend.OneShot, backend.TwoShot}
	for _, a := range all {
		if a.String() == name {
			return a, nil
		}
	}
	return 0, fmt.Errorf("unknown algorithm %q: use one of %v", name, all)
}

// args returns the command line that makes another process measure the same.
func (b *benchCmd) args() []string {
	args := []string{
		"bench", fmt.Sprint("--n=", b.N), "--collective=" + b.Collective, "--dtype=" + b.DType,
		"--op=" + b.Op,
		fmt.Sprint("--root=", b.Root), fmt.Sprint("--min=", b.Min), fmt.Sprint("--max=", b.Max),
		fmt.Sprint("--factor=", b.Factor), fmt.Sprint("--iters=", b.Iters), fmt.Sprint("--time=",
			b.Time),
		"--algorithm=" + b.Algorithm,
		fmt.Sprint("--alloc=", b.Alloc), fmt.Sprint("--in-place=", b.InPlace), fmt.Sprint("--json=",
			b.JSON), fmt.Sprint("--tune=", b.Tune),
	}
	if b.Backend != "" {
		args = append(args, "--backend="+b.Backend)
	}
	return args
}

// choose returns the backend of that name, or the first that is available.
func choose(name string) (backend.Backend, error) {
	var names []string
	var problems []error
	for _, b := range euryale.Backends() {
		names = append(names, b.Name())
		if name != "" && name != b.Name() {
			continue
		}
		err := b.Available()
		if err == nil {
			return b, nil
		}
		problems = append(problems, fmt.Errorf("backend %s: %w", b.Name(), err))
	}
	if problems == nil {
		return nil,
			usageError{fmt.Errorf("no backend %q in this build: use one of %s, and see euryale "+
				"doctor", name, strings.Join(names, ", "))}
	}
	return nil, errors.Join(problems...)
}

// describe returns what a backend has to tell of itself, such as the library that
// it found; "" if nothing.
func describe(b backend.Backend) (string, error) {
	if d, ok := b.(interface{ Describe() (string, error) }); ok {
		return d.Describe()
	}
	return "", nil
}

// output is where rank 0 writes the measurements.
type output struct {
	*streams
	cmd     *benchCmd
	among   []backend.Backend // that the ranks may choose
	backend string            // of the communicator, on rank 0
	device  string            // the model of rank 0's GPU
	kernels *gpu.Communicator // nil where there are none
	wrong   int
}

// output writes what ranks measure on one of the backends, of euryale.Backends if none are
// given.
func (b *benchCmd) output(s *streams, among ...backend.Backend) *output {
	if among == nil {
		among = euryale.Backends()
	}
	return &output{streams: s, cmd: b, among: among}
}

// measure is one rank of the benchmark.
func (s *output) measure(comm backend.Communicator, c bench.Config) error {
	if comm.Rank() == 0 {
		s.backend = comm.Capabilities().Backend
	}
	if s.cmd.Tune {
		return s.tune(comm, c)
	}
	if comm.Rank() != 0 {
		return bench.Measure(comm, c, func(bench.Result) error { return nil })
	}
	if err := s.writeHead(comm, c); err != nil {
		return err
	}
	return bench.Measure(comm, c, s.add)
}

// writeHead writes the method, and the head of the table if there is one.
func (s *output) writeHead(comm backend.Communicator, c bench.Config) error {
	away, err := bench.OnDevice(comm.Device())
	if err != nil {
		return err
	}
	s.device = modelOf(comm.Device())
	lines := s.method(comm.Size(), c, away)
	if away {
		lines = append(lines, s.low(comm))
	}
	if h, ok := backend.As[*hierarchy.Communicator](comm); ok {
		text := h.Explain(c.Collective, c.DType, int(c.Max))
		lines = append(lines, strings.Split(strings.TrimSpace(text), "\n")...)
	}
	to := s.out
	if s.cmd.JSON {
		to = s.err // the lines stand alone
	}
	if _, err := io.WriteString(to, s.head(lines)); err != nil || s.cmd.JSON {
		return err
	}
	return bench.WriteTitles(to, away)
}

// modelOf returns the model of a GPU, "" for other devices.
func modelOf(d backend.Device) string {
	if g, ok := d.(interface{ Model() string }); ok {
		return g.Model()
	}
	return ""
}

// low says whether low-latency kernels take part, and notes those of all ranks.
func (s *output) low(comm backend.Communicator) string {
	kernels, reason := quick(comm)
	switch {
	case kernels == nil:
		return reason
	case hierarchical(comm) != nil:
		return "low-latency kernels: those of flat calls and of each phase; devices are " +
			kernels.Link().String()
	}
	s.kernels = kernels
	return "low-latency kernels: where they win; devices are " + kernels.Link().String()
}

// method describes how the numbers were measured.
func (s *output) method(P int, c bench.Config, away bool) []string {
	where := "buffers apart"
	if c.InPlace {
		where = "in place"
	}
	if c.Alloc {
		where += ", in memory from Alloc"
	}
	lines := []string{
		fmt.Sprintf("euryale bench: %v of %v, %v to %v, factor %d, backend %s, algorithm %v",
			c.Collective, c.DType, c.Min, c.Max, c.Factor, s.backendName(), c.Collective.Algorithm),
		fmt.Sprintf("ranks: %s; %s", s.ranks(P), where),
	}
	if away {
		return append(lines, deviceMethod(c)...)
	}
	return append(lines, fmt.Sprintf("method: back to back; %s; p50 and p99 of rank 0; algbw = "+
		"bytes / mean of the slowest rank; results verified", iters(c, c.Budget)))
}

// head formats the lines above the numbers, with the machine and the date.
func (s *output) head(lines []string) string {
	lines = append(lines, fmt.Sprintf("machine: %s; %s", s.machine(), bench.Version()),
		"date: "+time.Now().UTC().Format(time.RFC3339))
	return "# " + strings.Join(lines, "\n# ") + "\n"
}

// ranks describes the ranks: "4 processes".
func (s *output) ranks(P int) string {
	switch {
	case s.cmd.InProc:
		return fmt.Sprintf("%d goroutines of one process", P)
	case P == 1:
		return "1 process"
	}
	return fmt.Sprintf("%d processes", P)
}

// backendName names the backend.
func (s *output) backendName() string {
	if text := s.library(); text != "" {
		return s.backend + " (" + text + ")"
	}
	return s.backend
}

// library describes what the backend has found on this machine, "" if nothing.
func (s *output) library() string {
	i := slices.IndexFunc(s.among, func(b backend.Backend) bool { return b.Name() == s.backend })
	if i < 0 {
		return ""
	}
	text, err := describe(s.among[i])
	if err != nil {
		return ""
	}
	return text
}

// deviceMethod describes it for buffers on devices, where calls are timed in two ways.
func deviceMethod(c bench.Config) []string {
	return []string{
		fmt.Sprintf("method: calls started one behind the other in batches (20 to 400 calls or 2 "+
			"ms), a wait after each batch, by the host's clock; %s", iters(c, c.Budget/2)),
		"  stream = time of a call; host = of it, to start the call; both of the slowest rank; " +
			"algbw = bytes / stream; results verified",
		"  p50, p99 (rank 0), mean (slowest rank): calls started and waited for one by one, seen " +
			"by the host; as many again",
	}
}

// iters describes how many calls are timed.
func iters(c bench.Config, budget time.Duration) string {
	if c.Iters > 0 {
		return fmt.Sprintf("%d timed calls", c.Iters)
	}
	return fmt.Sprintf("as many timed calls as fit %v (%d to %d), a fifth of that to warm up",
		budget, bench.MinIters, bench.MaxIters)
}

// machine describes the machine and its GPUs.
func (s *output) machine() string {
	if s.device == "" {
		return bench.Machine()
	}
	return bench.Machine() + "; " + s.device
}

// add writes one result.
func (s *output) add(r bench.Result) error {
	r.Backend, r.InProc, r.Device, r.Machine, r.Version = s.backend, s.cmd.InProc, s.device,
		bench.Machine(), bench.Version()
	r.Used = s.used(r)
	s.wrong += r.Wrong
	if s.cmd.JSON {
		return r.WriteJSON(s.out)
	}
	return r.WriteRow(s.out)
}

// used returns the algorithm of low-latency kernels that calls had, "" where there are
// no such kernels.
func (s *output) used(r bench.Result) string {
	c, err := s.cmd.config(r.Ranks)
	if s.kernels == nil || err != nil {
		return ""
	}
	nbytes := operand(c.Collective.Kind, r.Bytes, r.Ranks)
	return s.kernels.Choose(c.Collective, c.DType, nbytes).String()
}

// operand returns the bytes that low-latency kernels go by, given those of the largest
// buffer: of a chunk, where they deal with chunks.
func operand(k backend.Kind, nbytes, ranks int) int {
	if k == backend.ReduceScatter || k == backend.AllGather {
		return nbytes / ranks
	}
	return nbytes
}

// verdict returns an error if a result was wrong.
func (s *output) verdict() error {
	if s.wrong == 0 {
		return nil
	}
	return fmt.Errorf("bench: %d elements are wrong: backend %s must not be used on this machine",
		s.wrong, s.backend)
}
