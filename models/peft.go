package models

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/euryale-ml/euryale/backend"
)

// peft is what PEFT's LoraConfig says of a LoRA adapter.
type peft struct {
	rank             int
	alpha            float64
	stable           bool
	dropout          float64
	targets, exclude patterns
	transform        []int // only these blocks, nil for all
	lists            patterns
	ranks            ordered[int] // of layers, by regular expressions
	alphas           ordered[float64]
	bias             string // "none", "all" or "lora_only"
	save             []string
	biased           bool
}

// patterns are names, or a regular expression.
type patterns struct {
	list []string
	text string
}

func (p *patterns) UnmarshalJSON(text []byte) error {
	*p = patterns{}
	if json.Unmarshal(text, &p.text) == nil {
		return nil
	}
	return json.Unmarshal(text, &p.list)
}

// read takes the values of adapter_config.json: those that LoraConfig takes for missing keys, and
// only what is known not to change what is computed besides.
func (p *peft) read(o *object) error {
	*p = peft{rank: 8, alpha: 8, bias: "none"}
	var blocks json.RawMessage
	err := errors.Join(o.only(map[string][]any{
		"peft_type": {"LORA"}, "task_type": {"CAUSAL_LM", "FEATURE_EXTRACTION", nil},
		"bias": {"none", "all", "lora_only", nil},
	}), o.into(map[string]any{
		"r": &p.rank, "lora_alpha": &p.alpha, "use_rslora": &p.stable, "lora_dropout": &p.dropout,
		"target_modules": &p.targets, "exclude_modules": &p.exclude, "layers_to_transform": &blocks,
		"layers_pattern": &p.lists, "rank_pattern": &p.ranks, "alpha_pattern": &p.alphas,
		"bias": &p.bias, "modules_to_save": &p.save, "lora_bias": &p.biased,
	}), initial(o), o.rest("auto_mapping", "base_model_name_or_path", "revision", "inference_mode",
		"peft_version", "fan_in_fan_out", "megatron_core", "loftq_config", "eva_config",
		"corda_config", "lora_ga_config", "qalora_group_size", "runtime_config"))
	if err != nil {
		return err
	}
	var one int
	if len(blocks) > 0 && json.Unmarshal(blocks, &one) == nil && string(blocks) != "null" {
		p.transform = []int{one}
	} else if len(blocks) > 0 {
		err = json.Unmarshal(blocks, &p.transform)
	}
	if p.lists.text != "" {
		p.lists = patterns{list: []string{p.lists.text}}
	}
	switch {
	case err != nil:
		return fmt.Errorf("layers_to_transform: %w", err)
	case p.targets.text != "" && (p.transform != nil || p.lists.list != nil):
		return fmt.Errorf("%w: layers_to_transform and layers_pattern with target_modules %q: "+
			"PEFT takes them with a list only", backend.ErrArgument, p.targets.text)
	case p.lists.list != nil && p.transform == nil:
		return fmt.Errorf("%w: layers_pattern without layers_to_transform", backend.ErrArgument)
	case math.IsInf(p.alpha, 0) || !(p.dropout >= 0 && p.dropout < 1):
		return fmt.Errorf("%w: lora_alpha %v, lora_dropout %v", backend.ErrArgument, p.alpha,
			p.dropout)
	}
	return nil
}

// initial checks init_lora_weights: with PiSSA, OLoRA, CorDA, LoftQ and their like PEFT changes the
// weights of the model when it loads an adapter, too.
func initial(o *object) error {
	if o.only(map[string][]any{
		"init_lora_weights": {true, false, "gaussian", "eva", "orthogonal", nil},
	}) != nil {
		return fmt.Errorf("%w: init_lora_weights is %s, for which PEFT may change the model's "+
			"weights when it loads the adapter: save it with save_pretrained's option "+
			"path_initial_model_for_weight_conversion", backend.ErrUnsupported,
			o.shown("init_lora_weights"))
	}
	return nil
}

// resolve finds the modules of a model that are adapted, as PEFT does.
func (p *peft) resolve(m *Model) (*adapter, error) {
	all, adapted := m.linears()
	if p.targets.list == nil && p.targets.text == "" {
		p.targets.list = adapted
	}
	a := &adapter{layers: map[string]lowRank{}, dropout: p.dropout, biased: p.biased,
		replaced: map[string]string{}}
	modules := m.modules()
	for _, name := range slices.Sorted(maps.Keys(modules)) {
		linear := slices.Contains(all, name[strings.LastIndexByte(name, '.')+1:])
		ok, err := p.adapts(name, linear)
		if err == nil && ok && !linear && name != "lm_head" {
			err = fmt.Errorf("%w: target_modules: %s is no linear layer: an adapter of it is not "+
				"supported", backend.ErrUnsupported, name)
		}
		if err == nil && ok {
			a.layers[name], err = p.of(name)
		}
		if err != nil {
			return nil, err
		}
	}
	if len(a.layers) == 0 {
		return nil, fmt.Errorf("%w: target_modules: %s has no such layers", backend.ErrArgument,
			m.Type)
	}
	return a, p.replace(m, a, modules)
}

// modules returns the names of all modules that have weights, or modules that do.
func (m *Model) modules() map[string]bool {
	all := map[string]bool{"lm_head": true}
	for tensor := range m.weights {
		name := m.canonical(tensor)
		for at := strings.LastIndexByte(name, '.'); at > 0; at = strings.LastIndexByte(name, '.') {
			name = name[:at]
			all[name] = true
		}
	}
	return all
}

// adapts reports whether a module has an adapter: PEFT's check_target_module_exists.
func (p *peft) adapts(name string, linear bool) (is bool, err error) {
	if p.exclude.text != "" {
		is, err = fullMatch("exclude_modules", p.exclude.text, name)
	}
	if is || err != nil || ends(name, p.exclude.list) {
		return false, err
	}
	for _, saved := range p.save {
		if strings.Contains("."+name+".", "."+saved+".") {
			return false, nil
		}
	}
	switch {
	case strings.EqualFold(p.targets.text, "all-linear"):
		return linear, nil
	case p.targets.text != "":
		return fullMatch("target_modules", p.targets.text, name)
	case slices.Contains(p.targets.list, name): // whatever its block
		return true, nil
	case !ends(name, p.targets.list):
		return false, nil
	}
	return p.transforms(name)
}

// ends reports whether a name is one of others, or ends with a dot and one.
func ends(name string, others []string) bool {
	return slices.ContainsFunc(others, func(o string) bool {
		return name == o || strings.HasSuffix(name, "."+o)
	})
}

// transforms reports whether layers_to_transform has the block of a module.
func (p *peft) transforms(name string) (bool, error) {
	if len(p.transform) == 0 {
		return true, nil
	}
	prefix, lists := `^(?:|.*?\.)`, p.lists.list
	if len(lists) == 0 {
		prefix, lists = `^.*?\.`, []string{"[^.]*"}
	}
	for _, list := range lists {
		e, err := pythons("layers_pattern", prefix, list, `\.(\d+)\..*$`)
		if err != nil {
			return false, err
		}
		if found := e.FindStringSubmatch(name); found != nil {
			block, err := strconv.Atoi(found[len(found)-1])
			return slices.Contains(p.transform, block), err
		}
	}
	return false, nil
}

// of returns rank and scale of a layer.
func (p *peft) of(layer string) (l lowRank, err error) {
	rank, alpha := p.rank, p.alpha
	for _, e := range p.ranks {
		if is, wrong := endMatch("rank_pattern", e.key, layer); is {
			rank = e.value
			break
		} else if wrong != nil {
			return l, wrong
		}
	}
	for _, e := range p.alphas {
		if is, wrong := endMatch("alpha_pattern", e.key, layer); is {
			alpha = e.value
			break
		} else if wrong != nil {
			return l, wrong
		}
	}
	const most = 1 << 24
	if rank < 1 || rank > most {
		return l, fmt.Errorf("%w: the rank of %s is %d, want 1 to %d", backend.ErrArgument, layer,
			rank, most)
	}
	l = lowRank{rank, alpha / float64(rank)}
	if p.stable {
		l.scale = alpha / math.Sqrt(float64(rank))
	}
	return l, nil
}

// replace finds the tensors of the model that the adapter has, too: those of modules_to_save, and
// biases.
func (p *peft) replace(m *Model, a *adapter, modules map[string]bool) error {
	all := map[string]bool{headName: true}
	for name := range m.weights {
		all[m.canonical(name)] = true
	}
	tensors := slices.Sorted(maps.Keys(all))
	for module := range modules {
		if !slices.ContainsFunc(p.save, func(s string) bool {
			return strings.HasSuffix(module, s)
		}) {
			continue
		}
		for _, t := range tensors {
			if !strings.HasPrefix(t, module+".") {
				continue
			}
			if _, adapted := a.layers[t[:strings.LastIndexByte(t, '.')]]; adapted ||
				a.replaced[t] != "" {
				return fmt.Errorf("%w: modules_to_save: %s is adapted, or saved, twice",
					backend.ErrUnsupported, t)
			}
			a.replaced[t] = t
		}
	}
	for _, t := range tensors {
		layer, ok := strings.CutSuffix(t, ".bias")
		_, adapted := a.layers[layer]
		if !ok || p.bias == "none" || p.bias == "lora_only" && !adapted {
			continue
		}
		if a.replaced[t] != "" {
			return fmt.Errorf("%w: bias %q with modules_to_save: %s is in both",
				backend.ErrUnsupported, p.bias, t)
		}
		if a.replaced[t] = t; adapted {
			a.replaced[t] = layer + ".base_layer.bias"
		}
	}
	return nil
}

// fullMatch is Python's re.fullmatch.
func fullMatch(key, expression, name string) (bool, error) {
	e, err := pythons(key, "^(?:", expression, ")$")
	return err == nil && e.MatchString(name), err
}

// endMatch reports whether a name, or its end behind a dot, matches: PEFT's get_pattern_key.
func endMatch(key, expression, name string) (bool, error) {
	e, err := pythons(key, `^(?:.*\.)?(?:`, expression, ")$")
	return err == nil && e.MatchString(name), err
}

// alike matches regular expressions that mean in Go what they mean in Python.
var alike = regexp.MustCompile(`^(?:[\w\-.*+?|)^$]|\((?:\?:)?|\\[.\-dDwW]|` +
	`\[\^?(?:[\w\-.]|\\[.\-dDwW])+\]|\{\d+(?:,\d*)?\})*$`)

// pythons compiles a regular expression of Python between two parts.
func pythons(key, before, expression, behind string) (*regexp.Regexp, error) {
	_, err := regexp.Compile(expression)
	e, wrong := regexp.Compile(before + expression + behind)
	if err != nil || wrong != nil || !alike.MatchString(expression) {
		return nil, fmt.Errorf("%w: %s: the regular expression %.80q: give a list of names in "+
			"place of it", backend.ErrUnsupported, key, expression)
	}
	return e, nil
}
