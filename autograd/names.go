package autograd

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/safetensors"
	"github.com/euryale-ml/euryale/internal/stock"
)

// In a file the tensors have the names of the graph's nodes, so that other programs find them and
// the order of parameters does not matter:
//
//	block0.attention.qkv.weight                        a parameter, or a variable of WithFrozen
//	bn.running_mean, bn.running_var                    the moving averages of the batch norm that
//	                                                   the variable bn scales ([stock.Averages])
//	solver.adam.m/block0.attention.qkv.weight          what the solver keeps for a parameter
//	solver.group.1.adam.m/ln_f.bias                    what group 1 of Groups keeps for one
//	solver.adam.steps                                  what it keeps besides
//
// In memory each has a key with the parameter's number in this program (param.key, piece.key, the
// names of Stateful). Files of format 1 have these keys.
const (
	numberedFormat = 1 // with the keys as names
	solverPrefix   = "solver."

	meanSuffix, varianceSuffix = ".running_mean", ".running_var"
)

// checkName returns an error for a name that a file cannot give to a tensor.
func checkName(name string) error {
	switch {
	case name == "" || name == stock.Unnamed:
		return fmt.Errorf("%w: it has no name", backend.ErrArgument)
	case !utf8.ValidString(name):
		return fmt.Errorf("%w: its name is not UTF-8", backend.ErrArgument)
	case name == safetensors.MetadataName:
		return fmt.Errorf("%w: the file's metadata has this name", backend.ErrArgument)
	}
	return nil
}

// namedTensor is a tensor with a name in a file.
type namedTensor struct {
	key, file string
	what      string // in messages
}

// checkNames returns an error unless all names are valid and unique.
func checkNames(all []namedTensor) error {
	const rename = "give each variable a unique name (gorgonia.WithName): the tensors of a " +
		"file have them"
	by := map[string]string{}
	for _, n := range all {
		err := checkName(n.file)
		other, twice := by[n.file]
		switch {
		case err != nil:
		case twice:
			err = fmt.Errorf("%w: its name is also the name of %s", backend.ErrArgument, other)
		case strings.HasPrefix(n.file, solverPrefix):
			err = fmt.Errorf("%w: its name begins with %q, as only a solver's state does",
				backend.ErrArgument, solverPrefix)
		}
		if err != nil {
			return fmt.Errorf("%s: %w: %s", n.what, err, rename)
		}
		by[n.file] = n.what
	}
	return nil
}

// tensors returns the names of all tensors of the model.
func (v *inventory) tensors() (all []namedTensor) {
	for _, p := range v.learnables {
		what := fmt.Sprintf("parameter %d", p.index)
		if p.node.Name() != stock.Unnamed {
			what += fmt.Sprintf(", %q", p.name)
		}
		all = append(all, namedTensor{p.key(), p.node.Name(), what})
	}
	for _, p := range v.pieces() {
		what := p.name
		if p.file != stock.Unnamed {
			what += fmt.Sprintf(", %q", p.file)
		}
		all = append(all, namedTensor{p.key, p.file, what})
	}
	return all
}

// rename gives moving averages of an older version, which had the numbers of batch norms in their
// graph, the names that they have in this program, as far as their shapes say which are which. It
// returns an error, and renames none, if a number may belong to several.
func (v *inventory) rename(all map[string]stored, nameOf func(p piece) string) error {
	kindOf := func(suffix string, shape []int) string { return suffix + fmt.Sprint(shape) }
	old, here := map[string][]string{}, map[string][]string{}
	for name, t := range all {
		if suffix := numberedAverage(name); suffix != "" {
			old[kindOf(suffix, t.Shape)] = append(old[kindOf(suffix, t.Shape)], name)
		}
	}
	for _, p := range v.averages {
		if _, there := all[nameOf(p)]; !there {
			kind := kindOf(p.file[strings.LastIndex(p.file, "."):], p.shape)
			here[kind] = append(here[kind], nameOf(p))
		}
	}
	for _, kind := range slices.Sorted(maps.Keys(here)) {
		if n := len(old[kind]); n > 1 || n == 1 && len(here[kind]) > 1 {
			return fmt.Errorf("%w: an older version has numbered the moving averages of batch "+
				"norms by their places in a graph, and which are which is unknown (%s, and here "+
				"%s): load the other tensors alone by LoadWeights with NonStrict, and give "+
				"ReadWeights' to SetStats of the operations", backend.ErrArgument,
				nameList(old[kind]), nameList(here[kind]))
		}
	}
	for kind, names := range here {
		if len(old[kind]) == 1 {
			all[names[0]] = all[old[kind][0]]
			delete(all, old[kind][0])
		}
	}
	return nil
}

// numberedAverage returns the suffix of a name that moving averages have in files of older versions
// and of format 1, "" for other names, such as those with a hash of 16 digits.
func numberedAverage(name string) (suffix string) {
	parts := strings.Split(name, ".")
	if len(parts) != 3 || len(parts[1]) > 6 {
		return ""
	}
	if _, err := strconv.ParseUint(parts[1], 10, 32); err != nil {
		return ""
	}
	switch parts[0] + "." + parts[2] {
	case "batchnorm.running_mean", averagePrefix + "mean":
		return meanSuffix
	case "batchnorm.running_var", averagePrefix + "variance":
		return varianceSuffix
	}
	return ""
}

// fileNames returns the names in a file of the model's tensors and of what the solver keeps for
// parameters, by their keys. Everything else is the solver's.
func (d *DataParallel) fileNames(by gorgonia.Solver) map[string]string {
	all := map[string]string{}
	for _, n := range d.model.tensors() {
		all[n.key] = n.file
	}
	for i, p := range d.params {
		keys, _ := solver.VectorNames(by, i)
		for _, key := range keys {
			all[key] = solverPrefix + key[:strings.LastIndex(key, ".")] + "/" + p.node.Name()
		}
	}
	return all
}

// naming returns the function that names the tensors of a checkpoint in a file, by their keys.
func (d *DataParallel) naming(model map[string]stored,
	solver gorgonia.Solver) func(key string) string {
	names := d.fileNames(solver)
	if d.stepsSome(model, solver) {
		names = d.fileNames(nil)
	}
	return func(key string) string { return cmp.Or(names[key], solverPrefix+key) }
}

// stepsSome reports whether a solver has been given only some of the parameters, which is allowed:
// then its keys count only these.
func (d *DataParallel) stepsSome(model map[string]stored, by gorgonia.Solver) bool {
	if _, groups := by.(*solver.Groups); groups {
		return false // of all
	}
	keys, _ := solver.VectorNames(by, len(d.params)-1)
	if len(keys) == 0 {
		return false
	}
	_, all := model[keys[0]]
	return !all
}

// keys returns the function that gives the tensors of a file their keys in this program.
func (d *DataParallel) keys(r record, solver gorgonia.Solver) func(name string) string {
	keys := map[string]string{}
	if r.Format == numberedFormat {
		return func(name string) string { return name }
	}
	for key, name := range d.fileNames(solver) {
		keys[name] = key
	}
	return func(name string) string {
		return cmp.Or(keys[name], strings.TrimPrefix(name, solverPrefix))
	}
}

// nameList writes names for a message, the first few of many.
func nameList(names []string) string {
	const most = 8
	if len(names) > most {
		return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
	}
	return strings.Join(names, ", ")
}
