package cuda

import (
	"debug/elf"
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// signature is what the PTX says of a kernel.
type signature struct {
	nbytes  int // of the parameters
	threads int // the most in a block
}

var (
	parameter = regexp.MustCompile(`\.param (?:\.align \d+ )?\.(\w)(\d+) \w+(?:\[(\d+)\])?`)
	mostOf    = regexp.MustCompile(`\.maxntid (\d+), 1, 1`)
	forHopper = regexp.MustCompile(`\n\.target sm_90a?\n`)
	sharing   = regexp.MustCompile(`\n\.minnctapersm \d+`)
)

// signatures is for compute capability 8.0, where there are all kernels.
func signatures(t *testing.T) map[Entry]signature {
	t.Helper()
	texts := require.Value(textsWith("", 80))(t)
	all := map[Entry]signature{}
	for family, text := range texts {
		for name, body := range bodies(text) {
			e := require.Value(parseEntry(name))(t)
			if _, again := all[e]; again {
				t.Errorf("%v is in %s and elsewhere", e, family)
			}
			all[e] = parseSignature(t, e, body)
		}
	}
	return all
}

func parseSignature(t *testing.T, e Entry, text string) signature {
	t.Helper()
	params, rest, _ := strings.Cut(text, "\n)")
	var s signature
	for _, p := range parameter.FindAllStringSubmatch(params, -1) {
		bits, _ := strconv.Atoi(p[2])
		elements := 1
		if p[3] != "" {
			elements, _ = strconv.Atoi(p[3])
		}
		if bits*elements%64 != 0 {
			t.Errorf("%v has a parameter that is no multiple of 8 bytes: %s", e, p[0])
		}
		s.nbytes += bits / 8 * elements
	}
	m := mostOf.FindStringSubmatch(rest)
	s.threads, _ = strconv.Atoi(m[1])
	return s
}

// textsWith is ptxWith, read.
func textsWith(kernels string, capability int) (map[string]string, error) {
	sources, err := ptxWith(kernels, capability)
	texts := map[string]string{}
	for family, s := range sources {
		text, failed := s.text()
		texts[family], err = text, errors.Join(err, failed)
	}
	return texts, err
}

func TestEveryKernelIsNamedVerbOpDType(t *testing.T) {
	types := []string{"b8", "b16", "b32", "b64", "b128", "f16", "bf16", "f32", "f64", "i32", "i64",
		"u8", "u32"}
	all := signatures(t)
	for e := range all {
		again, err := parseEntry(e.String())
		require.Check(t, again == e && err == nil && slices.Contains(types, e.Type), "%v", e)
	}
	require.Check(t, len(all) >= 190, "only %d kernels", len(all))
	_, err := parseEntry("nonsense")
	require.Check(t, err != nil, "a name of one part was accepted")
}

// targets are the compute capabilities that families have variants for.
var targets = []int{volta, 80, hopper}

func TestPTXIsForOldDriversAndDevices(t *testing.T) {
	texts := require.Value(textsWith("", volta))(t)
	for family, text := range texts {
		require.Check(t, strings.Contains(text, "\n.version 6.0\n.target sm_70\n"),
			"%s is not ISA 6.0 for sm_70", family)
	}
	for _, capability := range []int{volta, 75, 80, 89} {
		texts := require.Value(textsWith("", capability))(t)
		for family, text := range texts {
			require.Check(t, !strings.Contains(text, "griddepcontrol"),
				"%s uses programmatic dependent launch on devices of compute capability "+
					"%d, which have none", family, capability)
		}
	}
	require.Fails(t, "devices before Volta", require.Err(textsWith("", 61)),
		backend.ErrUnsupported, "compute capability 6.1: the oldest that works is 7.0")
}

// A newer variant of a family is there for instructions that older devices lack, and no older
// one has them: make ptx-check asks ptxas.
func TestVariantsAreForTheirInstructions(t *testing.T) {
	newer := map[int][]string{
		volta:  nil,
		80:     {"cp.async", "redux.sync", "cvt.rn.bf16", "m16n8k16"},
		hopper: {release, "wgmma"},
	}
	files := require.Value(namesIn(modules))(t)
	for _, file := range files {
		text := require.Value(source{dir: modules, variant: variant{file: file}}.text())(t)
		_, text, _ = strings.Cut(text, "\n.target "+targetMark)
		target, _ := strconv.Atoi(text[:2])
		if family, _, _ := strings.Cut(file, "."); newest([]string{file}, target,
			target)[family] != (variant{target, file}) {
			t.Errorf("%s is for sm_%d", file, target)
		}
		gains := target == volta
		for _, capability := range targets {
			for _, instruction := range newer[capability] {
				found := strings.Contains(text, instruction)
				gains = gains || found && capability == target
				require.Check(t, !found || capability <= target, "%s has %s", file, instruction)
			}
		}
		require.Check(t, gains, "%s has nothing that an older one lacks", file)
	}
}

func TestDevicesTakeTheNewestVariantThatTheyRun(t *testing.T) {
	names := []string{"sum.ptx", "gather.ptx", "gather.sm_80.ptx.gz", "sparse.sm_100.ptx",
		"sparse.sm_90.ptx", "sparse.sm_80.ptx", "sparse.ptx", "sum.sm_90a.ptx", "sum.sm_90b.ptx",
		"late.sm_90.ptx"}
	for _, test := range []struct {
		capability int
		want       map[string]variant
	}{
		{61, map[string]variant{}},
		{70, map[string]variant{"sum": {70, "sum.ptx"}, "gather": {70, "gather.ptx"},
			"sparse": {70, "sparse.ptx"}}},
		{75, map[string]variant{"sum": {70, "sum.ptx"}, "gather": {70, "gather.ptx"},
			"sparse": {70, "sparse.ptx"}}},
		{80, map[string]variant{"sum": {70, "sum.ptx"}, "gather": {80, "gather.sm_80.ptx.gz"},
			"sparse": {80, "sparse.sm_80.ptx"}}},
		{89, map[string]variant{"sum": {70, "sum.ptx"}, "gather": {80, "gather.sm_80.ptx.gz"},
			"sparse": {80, "sparse.sm_80.ptx"}}},
		{90, map[string]variant{"sum": {90, "sum.sm_90a.ptx"},
			"gather": {80, "gather.sm_80.ptx.gz"}, "sparse": {90, "sparse.sm_90.ptx"}, "late": {90,
				"late.sm_90.ptx"}}},
		{120, map[string]variant{"sum": {70, "sum.ptx"}, "gather": {80, "gather.sm_80.ptx.gz"},
			"sparse": {100, "sparse.sm_100.ptx"}, "late": {90, "late.sm_90.ptx"}}},
	} {
		for range 2 {
			if got := newest(names, test.capability, test.capability); !maps.Equal(got, test.want) {
				t.Errorf("compute capability %d takes %v, want %v", test.capability, got, test.want)
			}
			slices.Reverse(names)
		}
	}
	if got := newest(names, 90, 120)["sum"]; got != (variant{70, "sum.ptx"}) {
		t.Errorf("what runs on compute capability 9.0 alone was chosen on 12.0: %v", got)
	}
}

// EURYALE_KERNELS=sm_70 tries the kernels of an older device on a newer one.
func TestKernelsOfOlderDevicesCanBeAskedFor(t *testing.T) {
	for _, test := range []struct {
		kernels    string
		capability int
		as         int // 0 for an error
	}{
		{"sm_70", 90, 70}, {"sm_70", 70, 70}, {"sm_75", 80, 75}, {"sm_80", 90, 80},
		{"sm_90", 90, 90},
		{"sm_90", 80, 0}, {"sm_61", 90, 0}, {"sm_", 90, 0}, {"sm_90a", 90, 0},
	} {
		texts, err := textsWith(test.kernels, test.capability)
		if test.as == 0 {
			require.Fails(t, fmt.Sprintf("%s with %d", test.kernels, test.capability), err,
				backend.ErrArgument, fmt.Sprintf("EURYALE_KERNELS=%q", test.kernels))
			continue
		}
		want, _ := textsWith("", test.as)
		require.Check(t, err == nil && maps.Equal(texts, want),
			"%s with %d does not give the kernels for %d: %v", test.kernels, test.capability,
			test.as, err)
	}
}

func TestDescribeSaysWhichKernelsAreLoaded(t *testing.T) {
	const (
		ampere = "sm_80 (attention_bf16, attention_few, attention_narrow, fewrows, gather, gemm, " +
			"ll128, recurrent), sm_70 (all others)"
		hopper = "sm_90 (allreduce, attention_bf16, fewrows), sm_80 (attention_few, " +
			"attention_narrow, gather, gemm, ll128, recurrent), sm_70 (all others)"
		later = "sm_90 (allreduce, fewrows), sm_80 (attention_bf16, attention_few, " +
			"attention_narrow, gather, gemm, ll128, recurrent), sm_70 (all others)"
		code    = ", as machine code"
		compile = ", compiled by the driver when they are first loaded"
	)
	for _, test := range []struct {
		kernels    string
		capability int
		want       string
	}{
		{"", 70, "sm_70" + compile}, {"", 75, "sm_70" + compile}, {"", 80, ampere + code},
		{"", 89, ampere + code}, {"", 90, hopper + code}, {"", 120, later + compile},
		{"sm_70", 90, "sm_70" + compile}, {"sm_80", 90, ampere + compile},
		{"bin/nvcc", 80, ampere + code + ", except what bin/nvcc has"},
	} {
		if got, err := Describe(test.kernels, test.capability); err != nil || got != test.want {
			t.Errorf("%q, %d: %q, %v", test.kernels, test.capability, got, err)
		}
	}
	_, err := Describe("sm_90", 80)
	require.Check(t, err != nil, "kernels were described that the device does not run")
}

// TestDevicesTakeTheMachineCodeOfTheirGeneration: code for 8.0 runs on every 8.x, and code for 9.0,
// where instructions of 9.0 alone may be used, on 9.0. It must be made of the text that was chosen.
func TestDevicesTakeTheMachineCodeOfTheirGeneration(t *testing.T) {
	for _, test := range []struct {
		kernels    string
		capability int
		plain, own string // targets, "" for none: of all families, and of attention_bf16
	}{
		{"", 70, "", ""}, {"", 75, "", ""}, {"", 80, "sm_80", "sm_80"},
		{"", 86, "sm_80", "sm_80"}, {"", 89, "sm_80", "sm_80"}, {"", 90, "sm_90", "sm_90a"},
		{"", 100, "", ""}, {"", 120, "", ""},
		{"sm_90", 90, "sm_90", "sm_90a"}, {"sm_80", 90, "", ""}, {"sm_70", 90, "", ""},
		{"sm_75", 80, "", ""}, {"sm_80", 86, "sm_80", "sm_80"},
	} {
		sources := require.Value(ptxWith(test.kernels, test.capability))(t)
		for family, s := range sources {
			want := test.plain
			if family == "attention_bf16" {
				want = test.own
			}
			if want != "" {
				want = family + "." + want + ".cubin.bz2"
			}
			require.Check(t, s.code == want, "%q, %d: %s is loaded from %q, want %q", test.kernels,
				test.capability, family, s.code, want)
		}
	}
}

// TestMachineCodeHasTheKernelsOfItsText, for the device that takes it.
func TestMachineCodeHasTheKernelsOfItsText(t *testing.T) {
	section := regexp.MustCompile(`\x00\.text\.([a-z0-9_]+)`)
	for _, capability := range []int{80, 90} {
		sources := require.Value(ptxWith("", capability))(t)
		texts := require.Value(Texts(capability))(t)
		for family, text := range texts {
			code := require.Value(sources[family].machineCode())(t)
			if of := int(code[48]); string(code[:4]) != elf.ELFMAG || of != capability { // e_flags
				t.Errorf("%s for %d is %q for %d", family, capability, code[:4], of)
			}
			got, want := map[string]bool{}, map[string]bool{}
			for _, name := range section.FindAllSubmatch(code, -1) {
				got[string(name[1])] = true
			}
			for name := range bodies(text) {
				want[name] = true
			}
			require.Check(t, maps.Equal(got, want), "%s for %d has %v, want %v: make machine-code",
				family, capability, got, want)
		}
	}
}

func computesAsTheHost(t *testing.T, family, text string) {
	t.Helper()
	// fma is written where it is meant: in elementary functions, and in products, whose sums have
	// an order of their own anyway.
	require.Check(t, slices.Contains([]string{"unary", "gemm", "convolve", "attention",
		"attention_bf16", "attention_few", "attention_narrow", Recurrences}, family) ||
		!strings.Contains(text, "fma.rn"),
		"%s has fused multiply-adds: results would differ from the host's", family)
	if strings.HasPrefix(family, "attention_") { // whose weights are rounded to 8 bits after this
		text = strings.ReplaceAll(text, "ex2.approx.ftz.f32", "")
	}
	if family == Recurrences { // where products are rounded
		text = strings.NewReplacer("ex2.approx.ftz.f32", "", "rcp.approx.ftz.f32", "").Replace(text)
	}
	for _, approximate := range []string{".approx", ".ftz", ".full", ".extern", "call.uni",
		".local "} {
		require.Check(t, !strings.Contains(text, approximate), "%s contains %q", family,
			approximate)
	}
}

func TestVariantsHaveTheSameKernels(t *testing.T) {
	base := require.Value(textsWith("", volta))(t)
	for _, capability := range targets {
		texts := require.Value(textsWith("", capability))(t)
		for family, text := range texts {
			require.Check(t, capability < hopper || forHopper.MatchString(text),
				"%s is not for sm_90", family)
			computesAsTheHost(t, family, text)
			got, want := parametersOf(t, text), parametersOf(t, base[family])
			require.Check(t, maps.Equal(got, want),
				"%s has other kernels for compute capability %d, or kernels with other "+
					"parameters", family, capability)
		}
		require.Check(t, len(texts) == len(base),
			"%d families for compute capability %d, %d for Volta", len(texts), capability,
			len(base))
	}
}

// parametersOf returns what the kernels of a text take, and bounds of their launches. How many
// blocks share a multiprocessor is no bound. A kernel goes by its plain name: see [Entry.plain].
func parametersOf(t *testing.T, text string) map[string]string {
	t.Helper()
	all := map[string]string{}
	for name, body := range bodies(text) {
		e := require.Value(parseEntry(name))(t)
		plain := e.plain().String()
		head, _, _ := strings.Cut(strings.ReplaceAll(body, name, plain), "\n{")
		head = sharing.ReplaceAllString(head, "")
		if before, ok := all[plain]; ok && before != head {
			t.Errorf("%s is launched in place of a kernel with other parameters", plain)
		}
		all[plain] = head
	}
	return all
}

// validator is a Launcher that checks calls against the PTX.
type validator struct {
	known map[Entry]signature
	seen  map[Entry]int
	last  Launch
}

func newValidator(t *testing.T) *validator {
	return &validator{known: signatures(t), seen: map[Entry]int{}}
}

func (v *validator) Launch(c Launch) error {
	v.seen[c.Entry]++
	v.last = c
	s, ok := v.known[c.Entry]
	perBlock := int(c.Block.X) * int(c.Block.Y)
	switch {
	case !ok:
		return fmt.Errorf("no kernel %v", c.Entry)
	case len(c.Params())*8 != s.nbytes:
		return fmt.Errorf("%v takes %d bytes of parameters, got %d", c.Entry, s.nbytes,
			len(c.Params())*8)
	case perBlock < 1 || perBlock > s.threads:
		return fmt.Errorf("%v takes up to %d threads in a block, got %+v", c.Entry, s.threads,
			c.Block)
	case c.Grid.X < 1 || c.Grid.Y < 1 || c.Grid.Y > 65535:
		return fmt.Errorf("%v has grid %+v", c.Entry, c.Grid)
	}
	return nil
}

func device(d backend.DType, addr uintptr, n int) backend.Buffer {
	return backend.OnDevice(d, addr, n)
}

// calls makes every call of every type for buffers of n elements.
func calls(k Kernels, n int) error {
	var errs []error
	add := func(err error) { errs = append(errs, err) }
	for _, d := range backend.DTypes() {
		x, y := device(d, 1<<40, n), device(d, 1<<41, n)
		add(k.Zero(x))
		add(k.Copy(x, y))
		add(k.Copy(x, device(d, 1<<40+8, n)))
		add(k.Divide(x, y, 2))
		for _, op := range backend.ReduceOps() {
			for _, sources := range []int{1, 2, 8, 9, 256} {
				add(k.Reduce(op, x, slices.Repeat([]backend.Buffer{y}, sources)...))
			}
		}
		for _, to := range backend.DTypes() {
			if d.Float() && to.Float() {
				add(k.Cast(device(to, 1<<42, n), x))
			}
		}
		for pitch := n; pitch < n+17; pitch++ {
			add(k.Copy2D(device(d, 1<<40, n*pitch), pitch, device(d, 1<<41, n*pitch), pitch, n, n))
		}
		add(errors.Join(gathers(k, d, n), exchanges(k, d, n)))
	}
	add(errors.Join(sparses(k, n), widens(k, n), halvings(k, n), products(k, n), windows(k, n),
		indexed(k, n), convolutions(k, n), attentions(k, n), recurrences(k, n)))
	return errors.Join(errs...)
}

func recurrences(k Kernels, batch int) error {
	const size = 512
	if batch == 0 {
		return nil
	}
	n, errs := batch*size, []error{}
	f32 := func(n int) backend.Buffer { return device(backend.F32, 1<<40, n) }
	l := kernels.LSTM{Steps: 1, Batch: batch, Size: size, Input: f32(4 * n), H0: f32(n), C0: f32(n),
		Weights: f32(4 * size * size), All: f32(3 * n), Kept: f32(5 * n)}
	g := kernels.LSTMGrad{LSTM: l, DY: f32(n), DC: f32(n), Gates: f32(8 * n)}
	for _, tf32 := range []bool{false, true} {
		l.TF32, g.TF32 = tf32, tf32
		errs = append(errs, k.LSTM(l), k.LSTMGrad(g))
	}
	l.Rounded, g.Rounded = device(backend.BF16, 1<<40, 3*n), device(backend.BF16, 1<<40, 8*n)
	return errors.Join(append(errs, k.LSTM(l), k.LSTMGrad(g))...)
}

func gathers(k Kernels, d backend.DType, n int) error {
	x, y := device(d, 1<<40, max(n, 4)*n), device(d, 1<<50, max(n, 4)*n)
	x3, y3 := x.Slice(0, 3*n), y.Slice(0, 3*n)
	x4, y4 := x.Slice(0, 4*n), y.Slice(0, 4*n)
	x, y = x.Slice(0, n*n), y.Slice(0, n*n)
	wide := func(b backend.Buffer) backend.Buffer { return device(d, b.Addr(), n*n*16) }
	return errors.Join(permute(k, x, y, []int{n, n}, []int{1, 0}), permute(k, x3, y3, []int{n, 3},
		[]int{1, 0}), permute(k, x3, y3, []int{3, n}, []int{1, 0}), permute(k, x4, y4, []int{4, n},
		[]int{1, 0}), permute(k, wide(x), wide(y), []int{n, n, 16}, []int{1, 0, 2}), permute(k,
		wide(x), wide(y), []int{n, 2, n, 2, 2, 2}, []int{5, 4, 3, 2, 1, 0}), k.CopyStrided(x, y,
		[]int{n, n}, []int{1, 0}), k.CopyStrided(x, y, []int{n, n}, []int{0, 1}))
}

// products makes products of every type, in large tiles and in small ones.
func products(k Kernels, n int) error {
	var errs []error
	for _, types := range productTypes {
		in, out := device(types[0], 1<<40, 3*n), device(types[1], 1<<42, max(n*n, 9*n))
		p := kernels.Product{M: n, N: n, K: 3, Alpha: 1, A: kernels.Matrix{Buffer: in, Pitch: 3},
			B: kernels.Matrix{Buffer: in, Pitch: n}, C: kernels.Matrix{Buffer: out, Pitch: n}}
		errs = append(errs, k.Multiply(p))
		p.Batch, p.M, p.B.Transposed, p.B.Pitch, p.C.Stride = 1<<17, 3, true, 3, 3*n
		p.C.Buffer = device(types[1], 1<<42, p.Batch*p.C.Stride)
		if p.A.Buffer = in; n < 3 {
			p.M = n
		}
		errs = append(errs, k.Multiply(p))
	}
	for i := range 4 * min(n, 1) {
		out := [...]backend.DType{backend.F32, backend.BF16}[i%2]
		p := kernels.Product{M: 8 + i/2*8, N: n, K: 8, Alpha: 1, A: kernels.Matrix{
			Buffer: device(backend.BF16, 1<<40, 128), Pitch: 8}, B: kernels.Matrix{
			Buffer: device(backend.BF16, 1<<41, 8*n), Pitch: 8, Transposed: true},
			C: kernels.Matrix{Buffer: device(out, 1<<42, 16*n), Pitch: n}}
		workspace := device(backend.U8, 1<<43, FewRowsWorkspace)
		for _, columns := range []int{16, 64} {
			errs = append(errs, k.FewRowsAs(p, workspace, columns, fewRowsBlocks, 0))
		}
	}
	return errors.Join(errs...)
}

// TestKernelsOfAnotherCompilerTakeThePlaceOfTheirs, and of no others.
func TestKernelsOfAnotherCompilerTakeThePlaceOfTheirs(t *testing.T) {
	dir := t.TempDir()
	require.Fails(t, "a directory without PTX", require.Err(textsWith(dir, 90)), dir)
	of := func(target string) string {
		return "\n.version 9.0\n.target " + target + "\n.address_size 64\n\n.visible .entry " +
			"a_b8(\n)\n{\n\tret;\n}\n"
	}
	for name, text := range map[string]string{"cast.ptx": of("sm_80"), "sparse.ptx": of("sm_80"),
		"sparse.sm_90.ptx": of("sm_90")} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	for _, test := range []struct {
		capability   int
		cast, sparse string
	}{
		{80, of("sm_80"), of("sm_80")},
		{90, strings.Replace(of("sm_90"), "{\n", "{\n\tgriddepcontrol.wait;\n", 1), of("sm_90")},
	} {
		embedded := require.Value(textsWith("", test.capability))(t)
		texts := require.Value(textsWith(dir, test.capability))(t)
		sources, err := ptxWith(dir, test.capability)
		if err != nil || sources["cast"].code != "" || sources["move"].code == "" {
			t.Errorf("machine code %q for another text, and %q for ours: %v",
				sources["cast"].code, sources["move"].code, err)
		}
		if len(texts) != len(embedded) || texts["cast"] != test.cast ||
			texts["sparse"] != test.sparse || texts["move"] != embedded["move"] {
			t.Errorf("%d families, embedded %d: cast %q, sparse %q", len(texts), len(embedded),
				texts["cast"], texts["sparse"])
		}
	}
}

func TestEveryCallFitsThePTX(t *testing.T) {
	v := newValidator(t)
	for _, n := range []int{0, 1, 2, 3, 15, 16, 17, 255, 256, 257, 1 << 20} {
		err := calls(New(v), n)
		require.Check(t, err == nil, "n = %d: %v", n, err)
		for e := range v.seen {
			if n == 0 && e.Verb != "fill" { // empty sums are 0
				t.Errorf("launch of %v for empty buffers", e)
			}
		}
	}
	// Rows whose lengths are whole units, and broadcasts of every type.
	for _, d := range backend.DTypes() {
		for _, width := range []int{1, 2, 3, 4, 8, 16} {
			n := 24 * width
			require.Report(t, permute(New(v), device(d, 1<<40, n), device(d, 1<<41, n),
				[]int{4, 6, width}, []int{1, 0, 2}))
		}
	}
	for e := range v.known {
		require.Check(t, v.seen[e] != 0, "no call uses %v", e)
	}
}

func TestGeometryAtBoundaries(t *testing.T) {
	v := newValidator(t)
	k := New(v)
	for n, want := range map[int]uint32{1: 1, 1024: 1, 1025: 2, 1 << 20: 1 << 10, 1<<20 + 1: 1<<10 +
		1, 1 << 40: maxBlocks} {
		if err := k.Divide(device(backend.F32, 1<<44, n), device(backend.F32, 1<<44, n),
			2); err != nil || v.last.Grid != (Size{want, 1}) {
			t.Errorf("divide %d: grid %+v, want %d blocks: %v", n, v.last.Grid, want, err)
		}
	}
	for width, want := range map[int]Size{1: {1, 256}, 3: {4, 64}, 256: {256, 1}, 1000: {256, 1}} {
		var c Launch
		c.rows(1<<20, width)
		require.Check(t, c.Block == want, "rows of %d: block %+v, want %+v", width, c.Block, want)
	}
}

func TestWidestUnitsAreUsed(t *testing.T) {
	v := newValidator(t)
	k := New(v)
	for _, c := range []struct {
		addr               uintptr
		pitch, width, want int
	}{{0, 32, 16, 128}, {8, 32, 16, 64}, {4, 32, 16, 32}, {0, 33, 16, 32}, {0, 34, 16, 64},
		{0, 32, 4, 128}, {0, 32, 5, 32}} {
		x := device(backend.F32, 1<<40+c.addr, 1<<10)
		if err := k.Copy2D(x, c.pitch, device(backend.F32, 1<<41, 1<<10), 32, c.width,
			2); err != nil || v.last.Entry.Type != fmt.Sprint("b", c.want) {
			t.Errorf("%+v: used %v: %v", c, v.last.Entry, err)
		}
	}
}

func TestShapesChooseTheKernel(t *testing.T) {
	v := newValidator(t)
	k := New(v)
	for _, c := range []struct {
		d          backend.DType
		dims, perm []int
		want       string
	}{
		{backend.F32, []int{64, 64}, []int{0, 1}, "copy_b8"},
		{backend.F32, []int{1, 64, 1, 64}, []int{2, 1, 0, 3}, "copy_b8"},
		{backend.F32, []int{64, 64}, []int{1, 0}, "transpose_wide_b32"},
		{backend.F32, []int{64, 63}, []int{1, 0}, "transpose_b32"},
		{backend.F32, []int{63, 64}, []int{1, 0}, "transpose_b32"},
		{backend.F32, []int{64, 3}, []int{1, 0}, "gather_b32"}, // too narrow for tiles
		{backend.F32, []int{16, 32, 2}, []int{1, 0, 2}, "transpose_wide_b64"},
		{backend.F32, []int{16, 33, 2}, []int{1, 0, 2}, "transpose_b64"},
		{backend.F32, []int{2, 32, 17, 4}, []int{0, 2, 1, 3}, "transpose_wide_b128"},
		{backend.F32, []int{2, 32, 15, 4}, []int{0, 2, 1, 3}, "gather_b128"},
		{backend.F32, []int{2, 32, 16, 8}, []int{0, 2, 1, 3}, "gather_b128"},
		{backend.F32, []int{2, 32, 16, 3}, []int{0, 2, 1, 3}, "gather_b32"},
		{backend.F32, []int{2, 2, 2, 2, 2, 2}, []int{5, 4, 3, 2, 1, 0}, "gather_b32"},
		{backend.F32, []int{40, 3, 5, 50}, []int{3, 2, 1, 0}, "transpose_b32"},
		{backend.F64, []int{2, 63, 17}, []int{0, 2, 1}, "transpose_b64"},
		{backend.BF16, []int{2, 63, 17}, []int{0, 2, 1}, "transpose_b16"},
		{backend.U8, []int{2, 63, 17}, []int{0, 2, 1}, "transpose_b8"},
		// Planes of 1024 bytes are split, and joined.
		{backend.U8, []int{2, 1024, 3}, []int{0, 2, 1}, "transpose_split_b8"},
		{backend.U8, []int{2, 1023, 3}, []int{0, 2, 1}, "gather_b8"},
		{backend.BF16, []int{512, 15}, []int{1, 0}, "transpose_split_b16"},
		{backend.F32, []int{2, 256, 3}, []int{0, 2, 1}, "transpose_split_b32"},
		{backend.F64, []int{2, 128, 3}, []int{0, 2, 1}, "transpose_split_b64"},
		{backend.F32, []int{3, 128, 5, 2}, []int{0, 2, 1, 3}, "transpose_split_b64"},
		{backend.F64, []int{2, 128, 3, 2}, []int{0, 2, 1, 3}, "gather_b128"},
		{backend.U8, []int{2, 3, 1024}, []int{0, 2, 1}, "transpose_pixels_b8"},
		{backend.U8, []int{2, 4, 1024}, []int{0, 2, 1}, "transpose_join_b8"},
		{backend.U8, []int{2, 3, 1023}, []int{0, 2, 1}, "gather_b8"},
		{backend.BF16, []int{15, 512}, []int{1, 0}, "transpose_join_b16"},
		{backend.F32, []int{2, 3, 256}, []int{0, 2, 1}, "transpose_join_b32"},
		{backend.F64, []int{2, 3, 1024}, []int{0, 2, 1}, "gather_b64"}, // as fast
		// planes that others lie between
		{backend.U8, []int{3, 2, 1024}, []int{2, 1, 0}, "gather_b8"},
	} {
		n := 1
		for _, d := range c.dims {
			n *= d
		}
		err := permute(k, device(c.d, 1<<40, n), device(c.d, 1<<41, n), c.dims, c.perm)
		require.Check(t, err == nil && v.last.Entry.String() == c.want,
			"%v %v by %v: used %v, want %s: %v", c.d, c.dims, c.perm, v.last.Entry, c.want, err)
	}
}

// Lengths and strides are the third word of a transposition and those after it.
func TestTranspositionsPassStrides(t *testing.T) {
	for _, c := range []struct {
		dims, perm []int
		want       []uint64
	}{
		{[]int{64, 48}, []int{1, 0}, []uint64{48, 64, 64, 48}},       // wide
		{[]int{63, 47}, []int{1, 0}, []uint64{47, 63, 63, 47}},       // words
		{[]int{3, 63, 47}, []int{0, 2, 1}, []uint64{47, 63, 63, 47}}, // words, several
		// words, others between
		{[]int{20, 3, 5, 50}, []int{3, 2, 1, 0}, []uint64{50, 20, 300, 750}},
		{[]int{2, 2048, 3}, []int{0, 2, 1}, []uint64{2048, 2048}}, // split
		{[]int{2, 3, 2049}, []int{0, 2, 1}, []uint64{2049, 2049}}, // join
	} {
		n := 1
		for _, d := range c.dims {
			n *= d
		}
		var l calling
		if err := permute(New(&l), device(backend.BF16, 1<<40, n), device(backend.BF16, 1<<41, n),
			c.dims, c.perm); err != nil || len(l) != 1 {
			t.Fatalf("%v by %v: %d calls, %v", c.dims, c.perm, len(l), err)
		}
		if got := l[0].Params()[2:][:len(c.want)]; !slices.Equal(got, c.want) {
			t.Errorf("%v by %v: %v has lengths and strides %v, want %v", c.dims, c.perm, l[0].Entry,
				got, c.want)
		}
	}
}

// Every divisor is right where quotients change, up to the largest dividend.
func TestDivisorsDivide(t *testing.T) {
	for _, d := range []int{1, 2, 3, 5, 7, 10, 16, 641, 1000, 1 << 16, 1<<16 + 1, 1<<30 - 1,
		1 << 30, 1<<30 + 1, maxIndex - 1} {
		var c Launch
		c.passDivisor(d)
		value, multiplier, shift := c.Params()[0]&math.MaxUint32, c.Params()[0]>>32, c.Params()[1]
		for _, q := range []int{0, 1, 2, maxIndex / d / 2, maxIndex/d - 1, maxIndex / d} {
			for a := q*d - 1; a <= q*d+1; a++ {
				if a < 0 || a >= maxIndex {
					continue
				}
				if got := uint64(a) * multiplier >> shift; value != uint64(d) ||
					got != uint64(a/d) {
					t.Errorf("%d / %d is %d, want %d", a, d, got, a/d)
				}
			}
		}
	}
}

// calling is a Launcher that keeps all calls.
type calling []Launch

func (l *calling) Launch(c Launch) error {
	*l = append(*l, c)
	return nil
}

func TestWhatIsTooLargeIsGatheredInParts(t *testing.T) {
	var l calling
	const rows, width = 5, maxIndex / 2
	dst, src := device(backend.U8, 1<<40, rows*width), device(backend.U8, 1<<41, rows*width/2)
	require.NoError(t, New(&l).CopyStrided(dst, src, []int{rows, width / 2, 2},
		[]int{width / 2, 1, 0}))
	at := 0
	for _, c := range l {
		n := int(c.Params()[2])
		if n >= maxIndex || c.Params()[0] != uint64(1<<40+at) ||
			c.Params()[1] != uint64(1<<41+at/2) {
			t.Errorf("%v of %d elements to %x from %x, after %d", c.Entry, n, c.Params()[0],
				c.Params()[1], at)
		}
		at += n
	}
	require.Check(t, at == rows*width, "%d elements of %d were gathered", at, rows*width)
}

func TestTilesAtBoundaries(t *testing.T) {
	v := newValidator(t)
	k := New(v)
	for _, c := range []struct {
		d    backend.DType
		m, n int // the source is n x m
		want int
	}{
		{backend.F32, 64, 64, 1},
		{backend.F32, 68, 64, 2},
		{backend.F32, 64, 68, 2},
		{backend.F32, 63, 63, 1},
		{backend.F32, 65, 65, 2}, // tiles of 64 x 120, the last of 128
		{backend.F32, 65, 128, 2},
		{backend.F32, 65, 129, 4},
		{backend.F64, 33, 64, 2},
		{backend.F64, 33, 65, 4},
		{backend.BF16, 62, 144, 1},
		{backend.BF16, 63, 145, 4},
		{backend.U8, 124, 288, 1},
		{backend.U8, 125, 289, 4},
		{backend.F64, 32, 64, 1},
		{backend.F64, 34, 66, 4},
		{backend.BF16, 128, 128, 1},
		{backend.BF16, 136, 128, 2},
		{backend.U8, 256, 128, 1},
		{backend.U8, 272, 144, 4},
	} {
		x, y := device(c.d, 1<<40, 3*c.m*c.n), device(c.d, 1<<41, 3*c.m*c.n)
		err := permute(k, x, y, []int{3, c.n, c.m}, []int{0, 2, 1})
		require.Check(t, err == nil && v.last.Grid == (Size{uint32(3 * c.want), 1}),
			"%v of %d x %d: %v has %v blocks for 3 matrices, want %d each: %v", c.d, c.n, c.m,
			v.last.Entry, v.last.Grid, c.want, err)
	}
}

func TestArgumentsAreChecked(t *testing.T) {
	k := New(newValidator(t))
	x, y, short := device(backend.F32, 1<<40, 4), device(backend.F32, 1<<41, 4),
		device(backend.F32, 1<<42, 3)
	integer, host := device(backend.I32, 1<<40, 4), backend.Of(make([]float32, 4))
	for name, err := range map[string]error{
		"host memory":     k.Copy(x, host),
		"zero host":       k.Zero(host),
		"cast integers":   k.Cast(x, integer),
		"reduce lengths":  k.Reduce(backend.Sum, x, y, short),
		"fill host":       k.Fill(host, 1),
		"divide by 0":     k.Divide(x, y, 0),
		"divide lengths":  k.Divide(x, short, 2),
		"gather axes":     k.CopyStrided(x, y, []int{4}, nil),
		"gather shape":    k.CopyStrided(x, y, []int{5}, []int{0}),
		"gather outside":  k.CopyStrided(x, y, []int{2, 2}, []int{3, 1}),
		"gather negative": k.CopyStrided(x, y, []int{4}, []int{-1}),
		"gather dtype":    k.CopyStrided(x, integer, []int{4}, []int{1}),
		"gather host":     k.CopyStrided(x, host, []int{4}, []int{1}),
	} {
		require.Fails(t, name, err, backend.ErrArgument)
	}
	many := slices.Repeat([]backend.Buffer{y}, MaxSources+1)
	seven := []int{2, 2, 2, 2, 2, 2, 2}
	big := device(backend.F32, 1<<40, 1<<7)
	for name, err := range map[string]error{
		"many sources": k.Reduce(backend.Sum, x, many...),
		"seven axes": permute(k, big, device(backend.F32, 1<<41, 1<<7), seven,
			[]int{6, 5, 4, 3, 2, 1, 0}),
	} {
		require.Fails(t, name, err, backend.ErrUnsupported)
	}
}

// counter is a Launcher that keeps nothing.
type counter struct{ n int }

func (c *counter) Launch(call Launch) error {
	c.n += len(call.Params())
	return nil
}

func TestCallsAllocateNothing(t *testing.T) {
	k := New(&counter{})
	x, y := device(backend.BF16, 1<<40, 1000), device(backend.BF16, 1<<41, 1000)
	srcs := []backend.Buffer{y, y, y, y}
	f := device(backend.F32, 1<<42, 1000)
	allocs := testing.AllocsPerRun(100, func() {
		require.Report(t, errors.Join(k.Zero(x), k.Copy(x, y), k.Cast(f, x), k.Divide(x, y, 2),
			k.Reduce(backend.Avg, x, srcs...), k.Copy2D(x, 10, y, 20, 10, 10)))
	})
	require.Check(t, allocs == 0, "%v allocations", allocs)
}
