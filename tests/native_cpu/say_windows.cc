// Answers questions about windows from common/windows.h: a line of integers for
// each line of input. test_windows.py asks, and compares the answers with
// kvlathe/plan/lives.py.
#include <iostream>
#include <string>

#include "common/windows.h"

int main() {
  using namespace kvlathe;
  std::string question;
  while (std::cin >> question) {
    kvlathe_window window{0, 0, 0, -1, 0};
    int place, offset, tokens, page, stage;
    std::cin >> window.sink >> window.recent >> window.exact >> place >> page;
    if (question == "kept") {
      std::cin >> offset >> tokens;
      const Kept kept = kept_of(window, place, offset, tokens, page);
      std::cout << kept.tokens << ' ' << kept.sink << ' ' << kept.gone << ' '
                << kept.hidden.begin << ' ' << kept.hidden.end << '\n';
    } else {
      std::cin >> offset >> stage;
      const int first = first_seen(place, place / page * page, window.recent,
                                   window.exact);
      const int sink = window.sink > offset ? window.sink - offset : 0;
      const Gap gap = hidden_stages(sink, first - offset, stage);
      std::cout << gap.begin << ' ' << gap.end << '\n';
    }
  }
}
