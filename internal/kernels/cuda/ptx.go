package cuda

import (
	"compress/bzip2"
	"compress/gzip"
	"embed"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/env"
)

// modules are compressed: as text they would be half of a small program. Machine code is a quarter
// smaller by bzip2 than by gzip, and takes a tenth of what is saved to read.
//
//go:embed *.ptx.gz *.cubin.bz2
var modules embed.FS

// Compute capabilities, 7.0 as 70: Volta is the oldest that the kernels run on, Hopper the first
// with programmatic dependent launch.
const (
	volta  = 70
	hopper = 90
)

// source is the text of a family, and its machine code where there is any. Both are read when they
// are needed: all texts take a tenth of a second.
type source struct {
	dir fs.FS
	variant
	pdl  bool   // the text is made to take part in programmatic dependent launch
	code string // the file among modules with what ptxas makes of the text, if not ""
}

// ptxWith returns the compiled kernels for devices of a compute capability (8.0 is 80): for each
// family the newest text that such a device runs, and none before volta. From hopper on,
// kernels take part in programmatic dependent launch. The value of EURYALE_KERNELS changes that,
// unless it is empty. "sm_70" selects the kernels for compute capability 7.0, which newer devices
// run, too. Anything else names a directory whose PTX replaces the text and the machine code of the
// same families, to compare compilers.
func ptxWith(kernels string, capability int) (map[string]source, error) {
	dir, target, err := parseKernels(kernels, capability)
	if err != nil {
		return nil, err
	}
	sources, err := embedded(target, capability)
	if err != nil || dir == "" {
		return sources, err
	}
	others, err := sourcesIn(os.DirFS(dir), target, capability)
	if err == nil && len(others) == 0 {
		err = env.Kernels.Wrong(dir, errors.New("it has no file *.ptx"))
	}
	maps.Copy(sources, others)
	return sources, err
}

// parseKernels returns the directory that EURYALE_KERNELS names, if any, and the compute
// capability for which kernels are chosen. It returns an error if the device runs none.
func parseKernels(kernels string, capability int) (dir string, target int, err error) {
	if capability < volta {
		return "", 0,
			fmt.Errorf("%w: compute capability %d.%d: the oldest that works is 7.0 (V100)",
				backend.ErrUnsupported, capability/10, capability%10)
	}
	number, isTarget := strings.CutPrefix(kernels, targetMark)
	if !isTarget {
		return kernels, capability, nil
	}
	target, err = strconv.Atoi(number)
	if err != nil || target < volta || target > capability {
		return "", 0, env.Kernels.Wrong(kernels, fmt.Errorf(
			"%w: this device runs kernels for sm_%d to sm_%d; a directory of that name is ./%s",
			backend.ErrArgument, volta, capability, kernels))
	}
	return "", target, nil
}

// targetMark is what names of targets begin with, in file names, too: family.ptx is for
// Volta and newer, family.sm_80.ptx for 8.0 and newer, and family.sm_90a.ptx for 9.0 alone: it has
// instructions that newer devices lack.
const targetMark = "sm_"

// What the names of compressed texts end with, and those of machine code.
const (
	compressed = ".gz"
	assembled  = ".cubin.bz2"
)

// namesIn returns the files with PTX in a directory.
func namesIn(dir fs.FS) ([]string, error) {
	plain, err := fs.Glob(dir, "*.ptx")
	if err != nil {
		return nil, err
	}
	short, err := fs.Glob(dir, "*.ptx"+compressed)
	return append(plain, short...), err
}

// text reads the text.
func (s source) text() (string, error) {
	f, err := s.dir.Open(s.file)
	if err != nil {
		return "", fmt.Errorf("PTX: %w", err)
	}
	defer f.Close()
	var plain io.Reader = f
	if strings.HasSuffix(s.file, compressed) {
		if plain, err = gzip.NewReader(f); err != nil {
			return "", fmt.Errorf("PTX %s: %w", s.file, err)
		}
	}
	data, err := io.ReadAll(plain)
	if err != nil {
		return "", fmt.Errorf("PTX %s: %w", s.file, err)
	}
	if s.pdl {
		return withPDL(string(data)), nil
	}
	return string(data), nil
}

// machineCode reads the machine code, nil where there is none.
func (s source) machineCode() ([]byte, error) {
	if s.code == "" {
		return nil, nil
	}
	f, err := modules.Open(s.code)
	if err != nil {
		return nil, fmt.Errorf("machine code: %w", err)
	}
	defer f.Close()
	data, err := io.ReadAll(bzip2.NewReader(f))
	if err != nil {
		return nil, fmt.Errorf("machine code %s: %w", s.code, err)
	}
	return data, nil
}

// embedded returns the sources that are embedded for kernels of a compute capability, on devices of
// that one or of a newer one. Machine code runs on devices of its major number alone, and is taken
// only where it is made of the text that is taken.
func embedded(capability, device int) (map[string]source, error) {
	sources, err := sourcesIn(modules, capability, device)
	if err != nil {
		return nil, err
	}
	names, err := fs.Glob(modules, fmt.Sprintf("*.%s%d[0-9]*%s", targetMark, device/10, assembled))
	if err != nil {
		return nil, err
	}
	for family, v := range newest(names, capability, device) {
		if s, ok := sources[family]; ok && s.target <= v.target {
			s.code = v.file
			sources[family] = s
		}
	}
	return sources, nil
}

// Texts returns what the driver of a device of a compute capability would compile: the text of each
// family. ptxas makes the machine code of them that is embedded for devices of that capability.
func Texts(capability int) (map[string]string, error) {
	sources, err := embedded(capability, capability)
	if err != nil {
		return nil, err
	}
	texts := make(map[string]string, len(sources))
	for family, s := range sources {
		if texts[family], err = s.text(); err != nil {
			return nil, err
		}
	}
	return texts, nil
}

// sourcesIn returns the texts in a directory for a compute capability, on devices of that one or of
// a newer one.
func sourcesIn(dir fs.FS, capability, device int) (map[string]source, error) {
	names, err := namesIn(dir)
	if err != nil {
		return nil, err
	}
	sources := make(map[string]source, len(names))
	for family, v := range newest(names, capability, device) {
		sources[family] = source{dir: dir, variant: v, pdl: capability >= hopper}
	}
	return sources, nil
}

// variant is one of the files of a family: the oldest compute capability that it is for.
type variant struct {
	target int
	file   string
}

// newest returns the variant of each family that is taken for a compute capability on a device of
// that one or of a newer one: the newest that both run.
func newest(names []string, capability, device int) map[string]variant {
	variants := map[string]variant{}
	for _, name := range names {
		stem := strings.TrimSuffix(name, assembled)
		stem = strings.TrimSuffix(strings.TrimSuffix(stem, compressed), ".ptx")
		family, number, found := strings.Cut(stem, "."+targetMark)
		number, alone := strings.CutSuffix(number, "a")
		target, err := strconv.Atoi(number)
		if !found {
			target, err = volta, nil
		}
		if err == nil && variants[family].target <= target && target <= capability &&
			(!alone || target == device) {
			variants[family] = variant{target, name}
		}
	}
	return variants
}

// Describe says which kernels a device of a compute capability loads, where EURYALE_KERNELS is
// as told: "sm_90 (allreduce, attention_bf16, fewrows), sm_80 (attention_few, attention_narrow,
// gather, gemm, ll128, recurrent), sm_70 (all others), as machine code".
func Describe(kernels string, capability int) (string, error) {
	dir, target, err := parseKernels(kernels, capability)
	if err != nil {
		return "", err
	}
	sources, err := embedded(target, capability)
	if err != nil {
		return "", err
	}
	families, form := map[int][]string{}, ", as machine code"
	for family, s := range sources {
		families[s.target] = append(families[s.target], family)
		if s.code == "" {
			form = ", compiled by the driver when they are first loaded"
		}
	}
	var parts []string
	for _, target := range slices.Backward(slices.Sorted(maps.Keys(families))) {
		slices.Sort(families[target])
		which := strings.Join(families[target], ", ")
		if target == volta {
			which = "all others"
		}
		parts = append(parts, fmt.Sprintf("%s%d (%s)", targetMark, target, which))
	}
	if len(parts) == 1 {
		parts = []string{fmt.Sprintf("%s%d", targetMark, volta)}
	}
	text := strings.Join(parts, ", ") + form
	if dir != "" {
		text += ", except what " + dir + " has"
	}
	return text, nil
}

// bodies yields the kernels of a PTX text: names and bodies.
func bodies(ptx string) iter.Seq2[string, string] {
	return func(yield func(name, body string) bool) {
		for _, kernel := range strings.Split(ptx, "\n"+entryMark)[1:] {
			name, body, _ := strings.Cut(kernel, "(")
			if !yield(name, body) {
				return
			}
		}
	}
}

// entryMark is what a kernel's line begins with.
const entryMark = ".visible .entry "

// Entry names a kernel. Its parts are kept apart so that naming one costs no
// allocation.
type Entry struct {
	Verb string
	Op   string // "" where the verb says all
	Type string // a dtype, or the bits of what is moved
}

// String returns the name in the PTX: "reduce_sum_f32".
func (e Entry) String() string {
	if e.Op == "" {
		return e.Verb + "_" + e.Type
	}
	return e.Verb + "_" + e.Op + "_" + e.Type
}

func parseEntry(name string) (Entry, error) {
	switch parts := strings.Split(name, "_"); len(parts) {
	case 2:
		return Entry{Verb: parts[0], Type: parts[1]}, nil
	case 3:
		return Entry{Verb: parts[0], Op: parts[1], Type: parts[2]}, nil
	}
	return Entry{}, fmt.Errorf("kernel %q is not named verb_op_dtype", name)
}
