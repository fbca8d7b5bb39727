package bench

import "testing"

func TestListsOfCoresAreCounted(t *testing.T) {
	for list, want := range map[string]int{"0\n": 1, "0-3\n": 4, "0-3,8,10-11": 7, "": 0} {
		if got := countList(list); got != want {
			t.Errorf("%q has %d, want %d", list, got, want)
		}
	}
	if Cores() < 1 {
		t.Errorf("this machine has %d cores", Cores())
	}
}
