package elastic

import "encoding/json"

// Env is the value of EURYALE_ELASTIC: which process of an elastic job this one is.
type Env struct {
	Addr    string // of the register
	Host    string // where other machines reach this one; "" if there are none
	Process ID     // its number, from 1
	First   int    // processes 1 to First are the first generation
	Seat    int    // its number on its machine, from 1; 0 if it takes one that is free then
	Limits  Limits
}

// String is what ReadEnv reads.
func (e Env) String() string {
	text, _ := json.Marshal(e) // numbers and texts have one
	return string(text)
}

// ReadEnv reads the value of EURYALE_ELASTIC.
func ReadEnv(text string) (e Env, err error) {
	err = json.Unmarshal([]byte(text), &e)
	return e, err
}

// FirstView returns the first generation.
func (e Env) FirstView() View {
	ids := make([]ID, e.First)
	for i := range ids {
		ids[i] = ID(i + 1)
	}
	return First(ids...)
}
