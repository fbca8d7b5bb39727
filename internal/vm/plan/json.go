package plan

import "encoding/json"

// JSON returns what the plan keeps when: the bytes of the arena that are in use during each step,
// and those outside it that stay, by whose they are.
func (p *Plan) JSON() string {
	type step struct {
		Does  string `json:"does"`
		Bytes int    `json:"bytes"`
	}
	whose := map[Kind]string{Input: "inputs", Constant: "constants", State: "solver",
		Gradient: "gradients", FullBucket: "gradients", PartialSum: "partial sums"}
	file := struct {
		Arena  int            `json:"arena_bytes"`
		Beside map[string]int `json:"beside"`
		Steps  []step         `json:"steps"`
	}{p.ArenaBytes, map[string]int{}, make([]step, len(p.Steps))}
	for i, s := range p.Steps {
		does := []rune(s.Name)
		file.Steps[i].Does = string(does[:min(len(does), 80)])
	}
	for kind, bytes := range p.Occupied() {
		if name, ok := whose[kind]; ok {
			file.Beside[name] = bytes
		}
	}
	for _, b := range p.Buffers {
		for i := b.First; b.Kind == Arena && i <= min(b.Last, len(p.Steps)-1); i++ {
			file.Steps[i].Bytes += b.Bytes
		}
	}
	text, _ := json.Marshal(file) // numbers and texts always can be written
	return string(text) + "\n"
}
