package cuda

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/cpu"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// emulator runs the kernels' sources on the host, in its own process that
// shares the arena.
type emulator struct {
	arena []byte
	in    io.Writer
	out   *bufio.Scanner
	line  bytes.Buffer
}

// emulatedBase is the arena's address in the process that runs the kernels.
const emulatedBase = 0x510000000000

// compiled compiles sources of the folder emulator, or links objects, to a program that runs the
// kernels on this machine, or skips the test.
func compiled(t *testing.T, sources ...string) (binary string) {
	t.Helper()
	return compiledBy(t, compilersHere(t)[0], sources...)
}

// compilersHere lists the C++ compilers of this machine, the kernels' own first, or skips the test.
func compilersHere(t *testing.T) (found []string) {
	t.Helper()
	if runtime.GOOS != "linux" {
		t.Skip("kernels are emulated on Linux only")
	}
	if testing.Short() {
		t.Skip("-short is for the race detector, which sees nothing of another program")
	}
	for _, cxx := range []string{os.Getenv("CXX"), "clang++-19", "clang++", "g++"} {
		if _, err := exec.LookPath(cxx); cxx != "" && err == nil {
			found = append(found, cxx)
		}
	}
	if found == nil {
		t.Skip("no C++ compiler: set CXX to one")
	}
	return found
}

func compiledBy(t *testing.T, cxx string, sources ...string) (binary string) {
	t.Helper()
	binary = filepath.Join(t.TempDir(), "program")
	var objects []string
	for i, source := range sources {
		if filepath.Ext(source) == ".o" {
			objects = append(objects, source)
			continue
		}
		object := fmt.Sprint(binary, i, ".o")
		compiles(t, cxx, "-c", "-o", object, source)
		objects = append(objects, object)
	}
	compiles(t, cxx, append(objects, "-o", binary)...)
	return binary
}

// TestThreadsWaitWithEachCompiler: where clang is installed, no other test runs the emulator that
// g++ makes, whose threads once waited for ever.
func TestThreadsWaitWithEachCompiler(t *testing.T) {
	t.Parallel()
	for _, cxx := range compilersHere(t) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		out, err := exec.CommandContext(ctx, compiledBy(t, cxx, "emulator/threads.cpp")).Output()
		require.Check(t, err == nil && string(out) == "ok\n", "%s: %s, %v", cxx, out, err)
	}
}

// compiles runs a compiler, through ccache where it is: half a minute, each time, is too long.
func compiles(t *testing.T, cxx string, args ...string) {
	t.Helper()
	args = append([]string{cxx, "-std=c++17", "-O1", "-ffp-contract=off", "-fwrapv",
		"-fno-strict-aliasing", "-pthread", "-Wno-unknown-pragmas", "-U_FORTIFY_SOURCE"}, args...)
	if cpu.X86.HasAVX2 && cpu.X86.HasFMA { // as make emulator does
		args = append(args, "-march=x86-64-v3")
	}
	if ccache, err := exec.LookPath("ccache"); err == nil {
		args = append([]string{ccache}, args...)
	}
	cmd := exec.Command(args[0], args[1:]...)
	out, err := cmd.CombinedOutput()
	require.That(t, err == nil, "%v: %v\n%s", cmd, err, out)
}

func startEmulator(t *testing.T, binary string, nbytes int) *emulator {
	t.Helper()
	file := require.Value(os.Create(filepath.Join(t.TempDir(), "arena")))(t)
	defer file.Close()
	require.NoError(t, file.Truncate(int64(nbytes)))
	arena := require.Value(mapped(file, nbytes))(t)
	cmd := exec.Command(binary, file.Name(), strconv.FormatUint(emulatedBase, 16))
	cmd.Stderr = os.Stderr
	in := require.Value(cmd.StdinPipe())(t)
	out := require.Value(cmd.StdoutPipe())(t)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		in.Close()
		err := cmd.Wait()
		require.Check(t, err == nil, "emulator: %v", err)
		require.NoError(t, unmap(arena))
	})
	return &emulator{arena: arena, in: in, out: bufio.NewScanner(out)}
}

func (e *emulator) Arena() (uintptr, int) { return emulatedBase, len(e.arena) }

func (e *emulator) Write(data []byte) error {
	copy(e.arena, data)
	return nil
}

func (e *emulator) Read(data []byte) error {
	copy(data, e.arena)
	return nil
}

func (e *emulator) Launch(c Launch) error {
	e.line.Reset()
	fmt.Fprintf(&e.line, "%v %x %x %x %x", c.Entry, c.Grid.X, c.Grid.Y, c.Block.X, c.Block.Y)
	for _, w := range c.Params() {
		fmt.Fprintf(&e.line, " %x", w)
	}
	e.line.WriteByte('\n')
	if _, err := e.in.Write(e.line.Bytes()); err != nil {
		return err
	}
	if !e.out.Scan() {
		return fmt.Errorf("the emulator ended at %v: %w", c.Entry, io.ErrUnexpectedEOF)
	}
	if e.out.Text() != "ok" {
		return fmt.Errorf("emulator: %s", e.out.Text())
	}
	return nil
}

func TestSourcesComputeWhatTheHostDoes(t *testing.T) {
	// make emulator has compiled the kernels by the same flags, in half a minute.
	kernels := cmp.Or(os.Getenv("EMULATED_KERNELS"), "emulator/kernels.cpp")
	binary := compiled(t, "emulator/emulator.cpp", kernels)
	t.Run("kernels", func(t *testing.T) { suite(t, startEmulator(t, binary, 64<<20)) })
	t.Run("accuracy", func(t *testing.T) { testAccuracy(t, binary) })
	t.Run("rounding", func(t *testing.T) { testRounding(t, binary) })
	t.Run("signatures", func(t *testing.T) { testSourcesAreWhatWasCompiled(t, binary) })
}

// testAccuracy holds the elementary functions to the errors that are promised.
func testAccuracy(t *testing.T, binary string) {
	n := "80000"
	if os.Getenv("EURYALE_FULL") == "1" {
		n = "400000"
	}
	out := require.Value(exec.Command(binary, "accuracy", n).Output())(t)
	most := map[string]float64{"exp": 1, "log": 1, "tanh": 2, "sigmoid": 3, "pow": 1, "expm1": 4,
		"log1p": 4, "log2": 2, "softplus": 4}
	for line := range strings.Lines(string(out)) {
		name, text, _ := strings.Cut(strings.TrimSpace(line), " ")
		got, err := strconv.ParseFloat(text, 64)
		function, _, _ := strings.Cut(name, "_")
		if err != nil || got >= most[function] {
			t.Errorf("%s is off by %s units of the last place, want less than %v", name, text,
				most[function])
		}
	}
	if lines := bytes.Count(out, []byte("\n")); lines != 2*len(most) {
		t.Errorf("%d functions were measured, want %d", lines, 2*len(most))
	}
}

// testRounding compares what Volta does in place of the instructions for bf16 with their
// definition: the emulator compiles what Volta has.
func testRounding(t *testing.T, binary string) {
	out, err := exec.Command(binary, "rounding").CombinedOutput()
	require.Check(t, err == nil && string(out) == "ok\n", "%v: %s", err, out)
}

// testSourcesAreWhatWasCompiled compares the names and parameters of the sources
// with those of the PTX.
func testSourcesAreWhatWasCompiled(t *testing.T, binary string) {
	out := require.Value(exec.Command(binary, "kernels").Output())(t)
	compiled := signatures(t)
	n := 0
	for line := range strings.Lines(string(out)) {
		var name string
		var s signature
		require.NoError(t, require.Err(fmt.Sscan(line, &name, &s.nbytes, &s.threads)))
		e, err := parseEntry(name)
		if err != nil || compiled[e] != s {
			t.Errorf("%s is %+v in the sources and %+v in the PTX: make ptx", name, s, compiled[e])
		}
		n++
	}
	require.Check(t, n == len(compiled), "%d kernels in the sources, %d in the PTX: make ptx", n,
		len(compiled))
}
